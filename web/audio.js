// The page's side of the player: the AudioContext, its unlocking, and a handle for each lane.
//
// The context is asked to run at 48 kHz, so that the browser resamples once, at the output, and samples
// pass through unchanged. Where it runs at another rate, each stream is resampled here before the ring.

import { Resampler } from "./resample.js";

export const RATE = 48_000;

/**
 * What happened to a lane. Positions are in samples of the stream, times in ms of performance.now().
 * `frame` is the audio clock, in samples of the context.
 * @typedef {{type: "started" | "dry" | "refilled" | "finished" | "overflow", at_ms: number, frame: number,
 *   samples: number}} LaneEvent
 */

/** One stream in the player. */
export class Lane {
  constructor(speaker, id, streamRate) {
    this.speaker = speaker;
    this.id = id;
    this.streamRate = streamRate;
    this.resampler = streamRate === speaker.rate ? null : new Resampler(streamRate, speaker.rate);
    this.played = 0; // samples of the stream, as last reported
    this.buffered = 0;
    this.state = "filling";
    this.underruns = 0;
    this.isCleared = false;
    this.reported_ms = performance.now();
    /** @type {(event: LaneEvent) => void} */
    this.onEvent = () => {};
  }

  /** @param {Float32Array} samples at the stream's rate; the array is given away */
  write(samples) {
    this.buffered += samples.length; // until the next report says it exactly
    this.#send(this.resampler ? this.resampler.push(samples) : samples);
  }

  /** Nothing more will come. */
  end() {
    if (this.resampler) this.#send(this.resampler.flush());
    this.#post("end");
  }

  /** Silence within 5 ms; the rest of the ring is dropped, and so is what is written later. */
  clear() {
    this.isCleared = true;
    this.#post("clear");
  }

  pause() {
    this.#post("pause");
  }

  resume() {
    this.#post("resume");
  }

  /** @param {number} gain 0 = plays on unheard */
  setGain(gain) {
    this.speaker.post({ type: "gain", id: this.id, gain });
  }

  /** Samples that have left the loudspeaker by now, as far as the browser tells. */
  get heard() {
    if (this.state !== "playing") return this.played;
    const since_ms = Math.min(performance.now() - this.reported_ms, 60); // reports come each 21 ms
    const ahead = since_ms - this.speaker.outputLatency_ms;
    const samples = this.played + (ahead / 1000) * this.streamRate;
    return Math.max(0, Math.min(Math.round(samples), this.played + this.buffered));
  }

  #send(samples) {
    if (!samples.length) return;
    this.speaker.post({ type: "write", id: this.id, samples }, [samples.buffer]);
  }

  #post(type) {
    this.speaker.post({ type, id: this.id });
  }
}

export class Speaker {
  constructor() {
    /** @type {AudioContext | null} */
    this.context = null;
    this.analyser = null;
    this.node = null;
    this.rate = RATE;
    this.deviceRate = 0;
    this.problem = ""; // why there will be no sound at all
    this.onState = () => {};
    this.onReport = () => {}; // each 21 ms while something plays; runs in hidden tabs, where timers sleep
    this.lanes = new Map();
    this.nextId = 1;
    this.captured = [];
    this.isCapturing = false;
  }

  /**
   * Makes the context and loads the worklet; it stays silent until `unlock` or an autoplay permission.
   * @param {number | null} rate null = whatever the device runs at
   */
  async open(rate = RATE) {
    if (!window.isSecureContext || typeof AudioWorkletNode === "undefined") {
      this.problem = window.isSecureContext ? "no-worklet" : "insecure";
      this.onState();
      return;
    }
    this.context = makeContext(rate);
    this.rate = this.context.sampleRate;
    this.context.onstatechange = () => this.onState();
    try {
      await this.context.audioWorklet.addModule(new URL("player.js", import.meta.url));
    } catch (error) {
      this.problem = `the player could not be loaded: ${error.message}`;
      this.onState();
      return;
    }
    this.node = new AudioWorkletNode(this.context, "player", {
      numberOfInputs: 0,
      outputChannelCount: [1],
    });
    this.node.port.onmessage = ({ data }) => this.#receive(data);
    this.analyser = new AnalyserNode(this.context, { fftSize: 2048, smoothingTimeConstant: 0 });
    this.node.connect(this.analyser).connect(this.context.destination);
    this.onState();
  }

  get isOpen() {
    return this.node !== null;
  }

  get isRunning() {
    return this.isOpen && this.context.state === "running";
  }

  /**
   * Call inside a gesture. Each gesture asks anew: a promise that was never kept must not stand in the
   * way of the next tap.
   */
  unlock() {
    if (!this.context || this.context.state === "running") return;
    this.context.resume().then(
      () => this.onState(),
      () => this.onState(),
    );
  }

  get outputLatency_ms() {
    return this.context ? 1000 * (this.context.outputLatency || this.context.baseLatency || 0) : 0;
  }

  /**
   * @param {number} streamRate @param {number} prebuffer_ms @param {number} gain
   * @returns {Lane | null} null where there is no sound
   */
  lane(streamRate, prebuffer_ms, gain = 1) {
    if (!this.isOpen) return null;
    const lane = new Lane(this, this.nextId++, streamRate);
    this.lanes.set(lane.id, lane);
    this.post({ type: "open", id: lane.id, prebuffer: Math.round((prebuffer_ms / 1000) * this.rate), gain });
    return lane;
  }

  post(message, transfer = []) {
    this.node.port.postMessage(message, transfer);
  }

  /** Keeps a copy of every rendered sample, for checks of what really reached the output. */
  capture(on) {
    if (on) this.captured = [];
    this.isCapturing = true; // until the last samples have come
    this.post({ type: "capture", on });
  }

  /** The device's own rate; needs a second context for a moment, so it is asked for once and late. */
  async findDeviceRate() {
    if (this.deviceRate || !this.context) return;
    const probe = new AudioContext();
    this.deviceRate = probe.sampleRate;
    await probe.close();
    this.onState();
  }

  #receive(message) {
    if (message.type === "captured") this.captured.push(message);
    if (message.type === "capture-over") this.isCapturing = false;
    if (message.type !== "report") return;
    const now = performance.now();
    for (const { id, played, buffered, state } of message.lanes) {
      const lane = this.lanes.get(id);
      if (!lane) continue;
      const scale = lane.streamRate / this.rate;
      lane.played = Math.round(played * scale);
      lane.buffered = Math.round(buffered * scale);
      lane.state = state;
      lane.reported_ms = now;
    }
    for (const event of message.events) this.#tell(event, now);
    for (const { id, state } of message.lanes) if (state === "over") this.lanes.delete(id);
    this.onReport();
  }

  #tell(event, now) {
    const lane = this.lanes.get(event.lane);
    if (event.type === "dry") lane.underruns++;
    const samples =
      event.at === undefined ? lane.played : Math.round((event.at * lane.streamRate) / this.rate);
    const at_ms = now + 1000 * (event.frame / this.rate - this.context.currentTime);
    lane.onEvent({ type: event.type, at_ms, frame: event.frame, samples });
  }
}

function makeContext(rate) {
  const options = { latencyHint: "interactive", ...(rate ? { sampleRate: rate } : {}) };
  try {
    return new AudioContext(options);
  } catch {
    return new AudioContext({ latencyHint: "interactive" }); // a browser that can't choose the rate
  }
}
