// The AudioWorklet: one ring buffer per stream, mixed into one output.
//
// Runs on the audio thread and knows nothing of text, sockets or turns. While a lane plays, its samples
// come out exactly as they went in; they are only touched where sound would otherwise break off:
// a 5 ms fade after the buffer ran dry, on a pause and on an interruption.
//
// `played` counts samples that were rendered in full, at the rate of this context.

const FADE = 240; // samples: 5 ms at 48 kHz, short to the ear and long enough not to click
const REPORT_QUANTA = 8; // a report each 1,024 samples, 21 ms: often enough to follow words
const CAPTURE_SAMPLES = 4096;
const FIRST_RING = 1 << 16; // 1.4 s; grows, since a server may run 20 s ahead
const MAX_RING = 1 << 22; // 87 s: more than any server may send ahead
const REFILL_GROWTH = 1.5; // a lane that ran dry waits for more the next time
const MAX_PREBUFFER = 48_000;

class Lane {
  /** @param {{id: number, prebuffer: number, gain: number}} options prebuffer in samples */
  constructor({ id, prebuffer, gain }) {
    this.id = id;
    this.prebuffer = prebuffer;
    this.gain = gain;
    this.targetGain = gain;
    this.ring = new Float32Array(FIRST_RING);
    this.written = 0;
    this.played = 0;
    /** @type {"filling" | "playing" | "pausing" | "paused" | "stopping" | "over"} */
    this.state = "filling";
    this.hasPlayed = false;
    this.isEnded = false; // no more will be written: running dry is the end, not an underrun
    this.fadeIn = 0; // samples left of a fade-in
    this.fadeOut = 0; // samples left of a fade-out that reads ahead of `played`
    this.tail = 0; // samples left of the echo after the last sound before a dry spell
    this.tailEnd = 0; // where that sound ended
    this.underruns = 0;
    this.events = [];
  }

  get buffered() {
    return this.written - this.played;
  }

  /** @param {Float32Array} samples */
  write(samples) {
    if (this.state === "stopping" || this.state === "over") return;
    const needed = this.buffered + samples.length + FADE; // what was just played is kept for the tail
    if (needed > this.ring.length && !this.grow(needed)) {
      this.events.push({ type: "overflow", lane: this.id, frame: currentFrame });
      return;
    }
    const mask = this.ring.length - 1;
    const start = this.written & mask;
    const first = Math.min(samples.length, this.ring.length - start);
    this.ring.set(samples.subarray(0, first), start);
    this.ring.set(samples.subarray(first), 0);
    this.written += samples.length;
  }

  grow(needed) {
    let length = this.ring.length;
    while (length < needed) length *= 2;
    if (length > MAX_RING) return false;
    const grown = new Float32Array(length);
    const from = Math.max(0, this.written - this.ring.length);
    for (let i = from; i < this.written; i++) {
      grown[i & (length - 1)] = this.ring[i & (this.ring.length - 1)];
    }
    this.ring = grown;
    return true;
  }

  /** Silences within 5 ms; what is left in the ring is dropped. */
  clear() {
    if (this.state === "playing" || this.state === "pausing") {
      if (this.state === "playing") this.fadeOut = FADE;
      this.state = "stopping";
    } else {
      this.state = this.tail > 0 ? "stopping" : "over";
      this.fadeOut = 0;
    }
  }

  pause() {
    if (this.state === "playing") {
      this.state = "pausing";
      this.fadeOut = FADE;
    } else if (this.state === "filling") {
      this.state = "paused";
    }
  }

  resume() {
    if (this.state !== "paused" && this.state !== "pausing") return;
    this.state = "filling"; // what lies in the ring starts at once, if it is enough
    this.fadeOut = 0;
    if (this.hasPlayed) this.fadeIn = FADE;
  }

  /**
   * Adds the next samples to `out`.
   * @param {Float32Array} out
   * @param {number} frame the audio clock at out[0]
   */
  render(out, frame) {
    const step = (this.targetGain - this.gain) / out.length;
    const gain = this.gain;
    this.gain = this.targetGain;
    if (this.state === "filling") this.start(frame);
    let i = 0;
    if (this.state === "playing") {
      i = Math.min(out.length, this.buffered);
      this.copy(out, i, gain, step);
      if (i < out.length) this.runDry(frame + i);
    }
    if (this.state === "pausing" || this.state === "stopping") this.fade(out, i, gain, step);
    if (this.tail > 0) this.echo(out, i, gain, step);
    if (this.state === "stopping" && this.fadeOut === 0 && this.tail === 0) this.state = "over";
  }

  start(frame) {
    const isEnough = this.buffered >= this.prebuffer || (this.isEnded && this.buffered > 0);
    if (!isEnough) {
      if (this.isEnded && this.buffered === 0) this.finish(frame);
      return;
    }
    this.state = "playing";
    this.events.push({ type: this.hasPlayed ? "refilled" : "started", lane: this.id, frame });
    this.hasPlayed = true;
  }

  copy(out, count, gain, step) {
    const mask = this.ring.length - 1;
    for (let i = 0; i < count; i++) {
      let sample = this.ring[this.played++ & mask];
      if (this.fadeIn > 0) sample *= 1 - this.fadeIn-- / FADE;
      out[i] += sample * (gain + step * i);
    }
  }

  runDry(frame) {
    if (this.isEnded) {
      this.finish(frame);
      return;
    }
    this.underruns++;
    this.events.push({ type: "dry", lane: this.id, frame, at: this.played });
    this.state = "filling";
    this.prebuffer = Math.min(Math.max(this.prebuffer, this.prebuffer * REFILL_GROWTH), MAX_PREBUFFER);
    this.tail = FADE;
    this.tailEnd = this.played;
    this.fadeIn = FADE;
  }

  finish(frame) {
    this.state = "over";
    this.events.push({ type: "finished", lane: this.id, frame });
  }

  /** Reads on without counting as played, quieter and quieter: a resume starts from `played` again. */
  fade(out, from, gain, step) {
    const mask = this.ring.length - 1;
    for (let i = from; i < out.length && this.fadeOut > 0; i++) {
      const at = this.played + FADE - this.fadeOut;
      const sample = at < this.written ? this.ring[at & mask] : 0;
      out[i] += sample * (this.fadeOut / FADE) * (gain + step * i);
      this.fadeOut--;
    }
    if (this.fadeOut === 0 && this.state === "pausing") this.state = "paused";
  }

  /** The last sound backwards and fading: no step where the samples are missing. */
  echo(out, from, gain, step) {
    const mask = this.ring.length - 1;
    for (let i = from; i < out.length && this.tail > 0; i++) {
      const at = this.tailEnd - 1 - (FADE - this.tail);
      out[i] += at >= 0 ? this.ring[at & mask] * (this.tail / FADE) * (gain + step * i) : 0;
      this.tail--;
    }
  }
}

class Player extends AudioWorkletProcessor {
  constructor() {
    super();
    /** @type {Map<number, Lane>} */
    this.lanes = new Map();
    this.quanta = 0;
    this.captured = null; // samples since the last post, only while somebody asked for them
    this.capturedCount = 0;
    this.port.onmessage = ({ data }) => this.handle(data);
  }

  handle(message) {
    if (message.type === "open") {
      this.lanes.set(message.id, new Lane(message));
      return;
    }
    if (message.type === "capture") {
      this.postCaptured();
      this.captured = message.on ? new Float32Array(CAPTURE_SAMPLES) : null;
      if (!message.on) this.port.postMessage({ type: "capture-over" });
      return;
    }
    const lane = this.lanes.get(message.id);
    if (!lane) return; // it played to its end meanwhile
    if (message.type === "write") lane.write(message.samples);
    else if (message.type === "end") lane.isEnded = true;
    else if (message.type === "clear") lane.clear();
    else if (message.type === "pause") lane.pause();
    else if (message.type === "resume") lane.resume();
    else if (message.type === "gain") lane.targetGain = message.gain;
  }

  process(_inputs, outputs) {
    const out = outputs[0][0];
    for (const lane of this.lanes.values()) lane.render(out, currentFrame);
    if (this.captured) this.capture(out);
    this.report();
    return true;
  }

  report() {
    const events = [];
    for (const lane of this.lanes.values()) {
      events.push(...lane.events);
      lane.events.length = 0;
    }
    const isDue = this.lanes.size > 0 && ++this.quanta % REPORT_QUANTA === 0;
    const over = [...this.lanes.values()].filter((lane) => lane.state === "over");
    if (!isDue && events.length === 0 && over.length === 0) return;
    const lanes = [...this.lanes.values()].map(({ id, played, buffered, state }) => ({
      id,
      played,
      buffered,
      state,
    }));
    for (const lane of over) this.lanes.delete(lane.id);
    this.port.postMessage({ type: "report", frame: currentFrame + 128, lanes, events });
  }

  capture(out) {
    if (this.capturedCount === 0) this.capturedFrame = currentFrame;
    this.captured.set(out, this.capturedCount);
    this.capturedCount += out.length;
    if (this.capturedCount + out.length > this.captured.length) this.postCaptured();
  }

  postCaptured() {
    if (!this.captured || this.capturedCount === 0) return;
    const samples = this.captured.slice(0, this.capturedCount);
    this.port.postMessage({ type: "captured", frame: this.capturedFrame, samples }, [samples.buffer]);
    this.capturedCount = 0;
  }
}

registerProcessor("player", Player);
