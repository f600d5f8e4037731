// Drawing: the sound as it plays, the lead over time, the waterfall of a turn.

import { make } from "./dom.js";

/** Makes the canvas as sharp as the screen. @returns {CanvasRenderingContext2D} in CSS pixels */
function sharp(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  return g;
}

function color(element, name) {
  return getComputedStyle(element).getPropertyValue(name).trim();
}

const PX_PER_S = 60;
const FLOOR_DB = -100;
const TOP_DB = -30;
const TOP_HZ = 12_000; // speech has little above
const LOUD = 0.35; // fills the height; speech seldom passes it

/** Waveform and spectrogram, running from right to left with the audio clock. */
export class Scope {
  /** @param {HTMLCanvasElement} wave @param {HTMLCanvasElement} spectrum */
  constructor(wave, spectrum) {
    this.wave = wave;
    this.spectrum = spectrum;
    this.columns = []; // {low, high, bins: Uint8Array} newest last
    this.numNew = 0; // of them not drawn yet
    this.taken_s = 0;
    this.size = "";
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.size = ""; // other colors: all of it again
      this.draw();
    });
  }

  /** Takes what the output sounds like now. @param {AnalyserNode} analyser @param {number} now_s audio clock */
  take(analyser, now_s) {
    const due = Math.min(4, Math.floor((now_s - this.taken_s) * PX_PER_S));
    if (due < 1) return;
    this.taken_s = now_s;
    const samples = new Float32Array(analyser.fftSize);
    const levels = new Float32Array(analyser.frequencyBinCount);
    analyser.getFloatTimeDomainData(samples);
    analyser.getFloatFrequencyData(levels);
    const { sampleRate } = analyser.context;
    const each = Math.floor(sampleRate / PX_PER_S);
    const numBins = Math.floor((TOP_HZ / (sampleRate / 2)) * levels.length);
    const bins = Uint8Array.from(levels.subarray(0, numBins), (db) =>
      Math.max(0, Math.min(255, (255 * (db - FLOOR_DB)) / (TOP_DB - FLOOR_DB))),
    );
    for (let back = due; back > 0; back--) {
      const piece = samples.subarray(
        Math.max(0, samples.length - back * each),
        samples.length - (back - 1) * each,
      );
      this.columns.push(
        piece.length
          ? { low: Math.min(...piece), high: Math.max(...piece), bins }
          : { low: 0, high: 0, bins },
      );
    }
    this.columns = this.columns.slice(-2000);
    this.numNew += due;
  }

  /** Moves the picture and draws only the new columns; all of them after a resize. */
  draw() {
    const { clientWidth: width, clientHeight: height } = this.spectrum;
    if (!width || !height) return;
    const size = `${width} ${height}`;
    const isFresh = size !== this.size;
    if (isFresh) this.#resize(width, size);
    const columns = this.columns.slice(isFresh ? -width : this.columns.length - this.numNew);
    this.numNew = 0;
    if (!isFresh && columns.length === 0) return;
    this.#drawWave(columns, width);
    this.#drawSpectrum(columns, width, height);
  }

  #resize(width, size) {
    this.size = size;
    this.palette = makePalette(...["--card", "--accent", "--hot"].map((name) => color(this.spectrum, name)));
    for (const canvas of [this.wave, this.spectrum]) {
      canvas.width = width; // which clears it, too
      canvas.height = canvas.clientHeight;
    }
    const g = this.wave.getContext("2d");
    g.fillStyle = color(this.wave, "--line");
    g.fillRect(0, this.wave.height / 2, width, 1);
    this.inks = [color(this.wave, "--accent"), color(this.wave, "--card")];
  }

  #drawWave(columns, width) {
    const { height } = this.wave;
    const g = this.wave.getContext("2d");
    const from = shift(g, this.wave, columns.length, this.inks[1]);
    g.fillStyle = this.inks[0];
    columns.forEach(({ low, high }, i) => {
      const top = Math.min(1, high / LOUD) * (height / 2);
      const bottom = Math.max(-1, low / LOUD) * (height / 2);
      g.fillRect(from + i, height / 2 - top, 1, Math.max(1, top - bottom));
    });
  }

  #drawSpectrum(columns, width, height) {
    const g = this.spectrum.getContext("2d");
    const from = shift(g, this.spectrum, columns.length, this.inks[1]);
    if (!columns.length) return;
    const image = g.createImageData(columns.length, height);
    const pixels = new Uint32Array(image.data.buffer);
    columns.forEach(({ bins }, x) => {
      for (let y = 0; y < height; y++) {
        const first = Math.floor(((height - 1 - y) / height) * bins.length);
        const last = Math.max(first + 1, Math.floor(((height - y) / height) * bins.length));
        let most = 0;
        for (let bin = first; bin < last; bin++) most = Math.max(most, bins[bin]);
        pixels[y * columns.length + x] = this.palette[most];
      }
    });
    g.putImageData(image, from, 0);
  }
}

/** Moves the picture to the left by `count` columns; returns where the free ones begin. */
function shift(g, canvas, count, background) {
  const from = canvas.width - count;
  if (from > 0 && count > 0) g.drawImage(canvas, -count, 0);
  g.fillStyle = background;
  g.fillRect(from, 0, count, canvas.height);
  return from;
}

/** 256 colors from the card's over the accent to the hottest, as ABGR words of an ImageData. */
function makePalette(...names) {
  const canvas = new OffscreenCanvas(256, 1);
  const g = canvas.getContext("2d");
  const gradient = g.createLinearGradient(0, 0, 256, 0);
  names.forEach((name, i) => gradient.addColorStop(i / (names.length - 1), name));
  g.fillStyle = gradient;
  g.fillRect(0, 0, 256, 1);
  return new Uint32Array(g.getImageData(0, 0, 256, 1).data.buffer.slice(0));
}

/**
 * Lead over time, with underruns marked.
 * @param {HTMLCanvasElement} canvas @param {import("./turn.js").Turn | null} turn
 */
export function drawLead(canvas, turn) {
  const g = sharp(canvas);
  const { clientWidth: width, clientHeight: height } = canvas;
  g.clearRect(0, 0, width, height);
  g.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  const points = turn?.leads ?? [];
  const base = height - 18;
  const from_ms = points[0]?.at_ms ?? 0;
  const span_ms = Math.max(2000, (points.at(-1)?.at_ms ?? 0) - from_ms);
  const most_ms = Math.max(500, ...points.map(({ lead_ms }) => lead_ms)) * 1.1;
  const x = (at_ms) => ((at_ms - from_ms) / span_ms) * width;
  const y = (lead_ms) => base - (lead_ms / most_ms) * (base - 14);
  g.fillStyle = color(canvas, "--line");
  g.fillRect(0, base, width, 1);
  if (points.length) {
    g.beginPath();
    g.moveTo(x(from_ms), base);
    for (const { at_ms, lead_ms } of points) g.lineTo(x(at_ms), y(lead_ms));
    g.lineTo(x(points.at(-1).at_ms), base);
    g.fillStyle = color(canvas, "--accent-soft");
    g.fill();
    g.beginPath();
    for (const { at_ms, lead_ms } of points) g.lineTo(x(at_ms), y(lead_ms));
    g.strokeStyle = color(canvas, "--accent");
    g.lineWidth = 1.5;
    g.stroke();
  }
  for (const { at_ms, for_ms } of turn?.underruns ?? []) {
    g.fillStyle = color(canvas, "--bad-soft");
    g.fillRect(x(at_ms), 0, ((for_ms ?? 0) / span_ms) * width, base);
    g.fillStyle = color(canvas, "--bad");
    g.fillRect(x(at_ms), 0, 2, base);
  }
  g.fillStyle = color(canvas, "--quiet");
  g.fillText(`${(most_ms / 1100).toFixed(1)} s ahead`, 2, 10);
  g.fillText("0 s", 2, height - 4);
  const end = `${(span_ms / 1000).toFixed(0)} s`;
  g.fillText(end, width - g.measureText(end).width - 2, height - 4);
}

/**
 * @param {HTMLElement} list an <ol>
 * @param {import("./turn.js").Stage[]} stages
 */
export function showWaterfall(list, stages) {
  const total = stages.at(-1)?.to_ms || 1;
  list.replaceChildren(
    ...stages.map((stage) => {
      const row = make("li");
      row.title = stage.meaning;
      const bar = make("span");
      bar.className = `bar ${stage.kind}`;
      bar.style.marginLeft = `${(100 * stage.from_ms) / total}%`;
      bar.style.width = `${(100 * (stage.to_ms - stage.from_ms)) / total}%`;
      const track = make("span");
      track.className = "track";
      track.append(bar);
      row.append(cell("stage", stage.name), track, cell("ms", (stage.to_ms - stage.from_ms).toFixed(1)));
      return row;
    }),
  );
}

function cell(name, text) {
  const element = make("span");
  element.className = name;
  element.textContent = text;
  return element;
}
