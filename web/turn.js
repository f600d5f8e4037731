// One utterance: what was sent, what came back and when, and what follows from it.

import { FLAG_LAST, samplesOf } from "./wire.js";

/** Stamps in `ctx.started.t`, in their order, with the stage that each of them ends. */
const STAGES = [
  ["trigger", "text wait", "until enough text had come; the writer's time, not the server's"],
  ["admit", "queue", "until a place was free"],
  ["prefill", "prefill", "text and voice read into the model"],
  ["ar1", "first frame", "to the first acoustic frame"],
  ["arN", "fill", "to enough frames for the first sound"],
  ["voc", "vocoder", "frames into sound"],
  ["post", "encode", "resampled, encoded, framed"],
];

/** @typedef {{name: string, kind: "page" | "text" | "server" | "network" | "player" | "voice", from_ms: number,
 *   to_ms: number, meaning: string}} Stage times since the keystroke */

export class Turn {
  /**
   * @param {string} ctx
   * @param {{mode: string, fields: object, rate: number, tokens: object, input_ms: number, lane: any,
   *   prebuffer_ms: number}} options `input_ms`: the keystroke or click that asked for it
   */
  constructor(ctx, { mode, fields, rate, tokens, input_ms, lane, prebuffer_ms }) {
    Object.assign(this, { ctx, mode, fields, rate, tokens, input_ms, lane, prebuffer_ms });
    /** @type {"waiting" | "speaking" | "spoken" | "interrupted" | "failed"} */
    this.state = "waiting";
    this.text = "";
    this.numChars = 0;
    this.isEnded = false; // no more text will be sent
    this.sent_ms = null; // first text
    this.sound_ms = null; // first sample rendered
    this.sound_frame = null; // the same on the audio clock
    this.frames = []; // {recv_ms, t_us, pts, n}
    this.chunks = []; // payloads, for the WAV
    this.encoding = fields.format.encoding;
    this.samples = 0;
    this.started = null;
    this.done = null;
    this.error = null; // the server's `error`, or {message} of the page's own
    this.words = [];
    this.hasEstimates = false;
    this.anchors = []; // {samples, c1}: points where the text is known
    this.textWaits = []; // positions where the server had no text to go on with
    this.dry = []; // {at_ms, samples, for_ms}
    this.leads = []; // {at_ms, lead_ms} for the chart
    this.onChange = () => {};
    if (lane) lane.onEvent = (event) => this.#heard(event);
  }

  get isLive() {
    return this.state === "waiting" || this.state === "speaking";
  }

  /** @param {string} text that has just been sent */
  wrote(text, now_ms) {
    if (this.sent_ms === null && text) this.sent_ms = now_ms;
    this.text += text;
    this.numChars += [...text].length;
  }

  /** @param {import("./wire.js").AudioFrame} frame */
  audio(frame, recv_ms) {
    if (!this.isLive) return; // on its way when the turn was interrupted
    this.state = "speaking";
    this.frames.push({ recv_ms, t_us: frame.t_us, pts: frame.pts, n: frame.n });
    this.chunks?.push(frame.payload);
    this.samples += frame.n;
    this.lane?.write(samplesOf(frame));
    if (frame.flags & FLAG_LAST) this.lane?.end();
  }

  /** @param {any} message one of the server's about this context */
  message(message) {
    if (message.type === "ctx.started") this.started = message;
    else if (message.type === "words") this.#addWords(message);
    else if (message.type === "seg.done") this.#segment(message.pts_end, message.c1);
    else if (message.type === "flush.done") this.#segment(message.pts, message.c1);
    else if (message.type === "starved") this.textWaits.push(message.pts);
    else if (message.type === "error") this.error = message;
    else if (message.type === "ctx.done") this.#finish(message);
  }

  #segment(samples, c1) {
    this.anchors.push({ samples, c1 });
    if (c1 >= this.numChars && !this.isEnded) this.textWaits.push(samples);
  }

  #addWords({ w, seg, final, estimated }) {
    if (final) this.words = this.words.filter((word) => word.isFinal || word.seg !== seg);
    for (const entry of w) this.words.push(Object.assign([...entry], { seg, isFinal: final }));
    this.words.sort((a, b) => a[3] - b[3]);
    this.hasEstimates ||= estimated === true;
  }

  #finish(message) {
    this.done = message;
    if (message.reason === "completed" && this.samples) {
      this.anchors.push({ samples: message.samples, c1: this.numChars });
    }
    if (!this.isLive) return;
    if (message.reason === "error") return this.fail(this.error ?? { message: "The turn failed." });
    if (message.reason === "cancelled" || message.reason === "replaced" || message.reason === "closed") {
      this.silence();
      return;
    }
    this.lane?.end();
    if (!this.lane || this.samples === 0) this.state = "spoken"; // else when the ring has played out
  }

  /**
   * Stops the sound here and now; audio still on its way is dropped.
   * @returns {number | null} samples heard, null where nothing can be played
   */
  silence() {
    const heard = this.lane ? this.lane.heard : null;
    this.lane?.clear();
    if (this.isLive) this.state = "interrupted";
    this.onChange();
    return heard;
  }

  /** What was received still plays; nothing more will come. */
  fail(error) {
    if (!this.isLive) return;
    this.error = error;
    this.state = "failed";
    this.lane?.end();
    this.onChange();
  }

  #heard(event) {
    if (event.type === "started") {
      this.sound_ms = Math.max(event.at_ms, this.frames[0]?.recv_ms ?? 0); // two clocks, a little apart
      this.sound_frame = event.frame;
    } else if (event.type === "dry")
      this.dry.push({ at_ms: event.at_ms, samples: event.samples, for_ms: null });
    else if (event.type === "refilled") this.#refilled(event.at_ms);
    else if (event.type === "finished" && this.state === "speaking") this.state = "spoken";
    else if (event.type === "overflow")
      this.error = { message: "More sound came than this page can hold; some is lost." };
    this.onChange();
  }

  #refilled(at_ms) {
    const last = this.dry.at(-1);
    if (last && last.for_ms === null) last.for_ms = at_ms - last.at_ms;
  }

  noteLead(now_ms) {
    if (this.sound_ms === null || !this.isPlaying) return;
    const last = this.leads.at(-1);
    if (last && now_ms - last.at_ms < 40) return;
    this.leads.push({ at_ms: now_ms, lead_ms: this.lead_ms });
  }

  get isPlaying() {
    return this.lane !== null && this.lane.state !== "over";
  }

  /** Sound received and not yet played. */
  get lead_ms() {
    return this.lane ? (1000 * (this.samples - this.lane.played)) / this.rate : 0;
  }

  /** Dry spells, without those where the server was waiting for text. */
  get underruns() {
    const near = 0.1 * this.rate;
    return this.dry.filter(({ samples }) => !this.textWaits.some((pts) => Math.abs(pts - samples) < near));
  }

  /** Client's time to the first frame: first text sent to first audio received. */
  get ttfa_ms() {
    return this.frames.length ? this.frames[0].recv_ms - this.sent_ms : null;
  }

  /** The server's part of it, on the server's clock. */
  get server_ms() {
    return this.frames.length ? this.frames[0].t_us / 1000 : null;
  }

  get network_ms() {
    return this.frames.length ? Math.max(0, this.ttfa_ms - this.server_ms) : null;
  }

  /** From the keystroke to the first sample at the loudspeaker. */
  get sound_after_ms() {
    if (this.sound_ms === null) return null;
    return this.sound_ms + this.lane.speaker.outputLatency_ms - this.input_ms;
  }

  /** How late a frame was at worst, for a player that starts with the first one. */
  get late_ms() {
    const first = this.frames[0];
    return Math.max(0, ...this.frames.map((f) => f.recv_ms - first.recv_ms - (1000 * f.pts) / this.rate));
  }

  /** @returns {Stage[]} from the keystroke to the sound, without gaps */
  waterfall() {
    if (!this.frames.length) return [];
    const stages = [];
    let at_ms = 0;
    const add = (name, kind, for_ms, meaning) => {
      if (!(for_ms >= 0)) return;
      stages.push({ name, kind, from_ms: at_ms, to_ms: at_ms + for_ms, meaning });
      at_ms += for_ms;
    };
    add("page", "page", this.sent_ms - this.input_ms, "from the keystroke to the first text sent");
    let before_us = 0;
    for (const [stamp, name, meaning] of STAGES) {
      const us = this.started?.t?.[stamp];
      if (us === undefined) continue;
      add(name, stamp === "trigger" ? "text" : "server", (us - before_us) / 1000, meaning);
      before_us = us;
    }
    add("egress", "server", (this.frames[0].t_us - before_us) / 1000, "until handed to the socket");
    add(
      "network",
      "network",
      this.network_ms,
      "both ways, and the browser: the page's time less the server's",
    );
    if (this.sound_ms !== null) {
      const received_ms = this.frames[0].recv_ms;
      add(
        "pre-buffer",
        "player",
        Math.max(0, this.sound_ms - received_ms),
        "held so that a late frame is no gap",
      );
      add(
        "output",
        "player",
        this.lane.speaker.outputLatency_ms,
        "the audio device, as the browser tells it",
      );
    }
    const silence_ms = this.done?.metrics?.lead_silence_ms;
    add("breath", "voice", silence_ms, "silence before the voice begins");
    return stages;
  }
}
