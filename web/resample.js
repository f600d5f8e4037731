// A streaming windowed-sinc resampler, for contexts that do not run at the stream's rate.
//
// Phases are exact (no drift) and the filter's delay is taken out, so output sample m sits at input
// position m * from / to. Cutting the input anywhere gives the same samples.

const ZERO_CROSSINGS = 24; // each side; with this window the stop band lies below -90 dB
const KAISER_BETA = 9;
const ROLL_OFF = 0.94; // of the lower Nyquist rate: leaves the filter room to fall

export class Resampler {
  /** @param {number} from @param {number} to sample rates in Hz */
  constructor(from, to) {
    const divisor = gcd(from, to);
    this.up = to / divisor;
    this.down = from / divisor;
    const cutoff = ROLL_OFF * Math.min(1, to / from);
    this.half = Math.ceil(ZERO_CROSSINGS / cutoff);
    this.filters = makeFilters(this.up, this.half, cutoff);
    this.held = new Float32Array(this.half - 1); // silence before the first sample
    this.heldFrom = 1 - this.half; // input position of held[0]
    this.numIn = 0;
    this.numOut = 0;
  }

  /** @param {Float32Array} samples @returns {Float32Array} what is complete by now */
  push(samples) {
    this.numIn += samples.length;
    return this.run(samples, Infinity);
  }

  /** The rest, with silence behind the last sample. */
  flush() {
    return this.run(new Float32Array(this.half), Math.round((this.numIn * this.up) / this.down));
  }

  run(samples, limit) {
    const { up, down, half, filters } = this;
    const input = new Float32Array(this.held.length + samples.length);
    input.set(this.held);
    input.set(samples, this.held.length);
    const end = this.heldFrom + input.length;
    const out = [];
    while (this.numOut < limit) {
      const position = Math.floor((this.numOut * down) / up);
      if (position + half >= end) break;
      const phase = (this.numOut * down) % up;
      const first = position - half + 1 - this.heldFrom;
      let sum = 0;
      for (let k = 0, f = phase * 2 * half; k < 2 * half; k++, f++) sum += input[first + k] * filters[f];
      out.push(sum);
      this.numOut++;
    }
    const keepFrom = Math.floor((this.numOut * down) / up) - half + 1;
    this.held = input.slice(Math.max(0, keepFrom - this.heldFrom));
    this.heldFrom = end - this.held.length;
    return Float32Array.from(out);
  }
}

/** One filter of 2 * half taps for each of the `up` positions between two input samples. */
function makeFilters(up, half, cutoff) {
  const filters = new Float32Array(up * 2 * half);
  for (let phase = 0; phase < up; phase++) {
    let sum = 0;
    for (let k = 0; k < 2 * half; k++) {
      const x = k - half + 1 - phase / up; // distance from the output sample, in input samples
      const window = bessel(KAISER_BETA * Math.sqrt(Math.max(0, 1 - (x / half) ** 2))) / bessel(KAISER_BETA);
      const tap = x === 0 ? cutoff : Math.sin(Math.PI * cutoff * x) / (Math.PI * x);
      filters[phase * 2 * half + k] = tap * window;
      sum += tap * window;
    }
    for (let k = 0; k < 2 * half; k++) filters[phase * 2 * half + k] /= sum; // every phase passes DC alike
  }
  return filters;
}

function bessel(x) {
  let sum = 1;
  let term = 1;
  for (let k = 1; term > 1e-10 * sum; k++) {
    term *= (x / (2 * k)) ** 2;
    sum += term;
  }
  return sum;
}

function gcd(a, b) {
  return b === 0 ? a : gcd(b, a % b);
}
