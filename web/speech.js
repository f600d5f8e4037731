// Turns on a connection: opening, writing, interrupting, pausing, and the reports the server needs.

import { Turn } from "./turn.js";

const PLAYOUT_MS = 250;
const PAUSE_TTL_MS = 10_000;
const KEPT_TURNS = 500;
const KEPT_SOUND = 20; // turns whose samples stay in memory for a download

export class Speech {
  /**
   * @param {import("./connection.js").Connection} connection
   * @param {import("./audio.js").Speaker} speaker
   * @param {import("./prebuffer.js").Prebuffer} prebuffer
   */
  constructor(connection, speaker, prebuffer) {
    Object.assign(this, { connection, speaker, prebuffer });
    /** @type {Turn[]} newest last */
    this.turns = [];
    /** @type {Map<string, Turn>} those whose `ctx.done` has not come */
    this.unfinished = new Map();
    this.audio_ms = 0; // when audio last came
    this.onTurn = (_turn) => {};
    this.nextCtx = 1;
    connection.onAudio = (ctx, frame, received_ms) => this.#audio(ctx, frame, received_ms);
    connection.onLost = (reason) => this.#lost(reason);
    speaker.onReport = () => this.#report();
  }

  /** Turns that speak or are about to. */
  get live() {
    return this.turns.filter((turn) => turn.isLive);
  }

  /**
   * A new turn; nothing is sent before its first text.
   * @param {{mode: string, fields: object, tokens?: object, input_ms: number, gain?: number,
   *   replaces?: Turn[]}} options `replaces`: turns this one interrupts
   */
  start({ mode, fields, tokens = null, input_ms, gain = 1, replaces = [] }) {
    const rate = Number(fields.format.sample_rate);
    const prebuffer_ms = this.prebuffer.target_ms;
    const lane = this.speaker.lane(rate, prebuffer_ms, gain);
    const turn = new Turn(`p${this.nextCtx++}`, { mode, fields, rate, tokens, input_ms, lane, prebuffer_ms });
    turn.opening = { ...fields, ...this.#replace(replaces) };
    turn.onChange = () => this.onTurn(turn);
    turn.played_ms = 0; // when its playout was last reported
    this.turns.push(turn);
    this.unfinished.set(turn.ctx, turn);
    for (const old of this.turns.slice(0, -KEPT_SOUND)) old.chunks = null;
    if (this.turns.length > KEPT_TURNS) this.turns.shift();
    return turn;
  }

  /** Silences first, tells the server what was heard, and names whom the next turn replaces. */
  #replace(turns) {
    const replaces = [];
    for (const turn of turns) {
      const samples = turn.silence();
      if (!this.unfinished.has(turn.ctx)) continue;
      if (samples !== null) this.connection.send({ type: "playout", ctx: turn.ctx, samples });
      replaces.push(turn.ctx);
    }
    return replaces.length ? { replaces } : {};
  }

  /** @param {Turn} turn @param {string} text */
  write(turn, text, { end = false, flush = false } = {}) {
    const { ctx } = turn;
    const now = performance.now();
    const opening = turn.opening ?? {};
    turn.opening = null;
    const message = { type: "text", ctx, text, ...(flush && { flush }), ...(end && { end }) };
    let isSent = true;
    if (opening.replaces) isSent = this.connection.send({ type: "open", ctx, ...opening });
    else Object.assign(message, opening); // the first text opens the turn: no message before it
    isSent &&= this.connection.send(message);
    turn.wrote(text, now);
    turn.isEnded ||= end;
    if (!isSent) turn.fail({ message: "There is no connection to the server." });
    this.onTurn(turn);
  }

  flush(turn) {
    if (this.unfinished.has(turn.ctx) && !turn.isEnded)
      this.connection.send({ type: "flush", ctx: turn.ctx, id: "pause" });
  }

  end(turn) {
    if (turn.isEnded) return;
    turn.isEnded = true;
    this.connection.send({ type: "end", ctx: turn.ctx });
  }

  /** Barge-in: the ring is emptied before the server hears of it. @param {Turn} turn */
  interrupt(turn) {
    const played_samples = turn.silence();
    if (!this.unfinished.has(turn.ctx)) return; // all of it was here already
    this.connection.send({
      type: "cancel",
      ctx: turn.ctx,
      ...(played_samples !== null && { played_samples }),
    });
  }

  /** It may have been a false alarm: stop, and keep everything. @param {Turn} turn */
  pause(turn) {
    turn.isPaused = true;
    turn.lane?.pause();
    if (this.unfinished.has(turn.ctx))
      this.connection.send({ type: "pause", ctx: turn.ctx, ttl_ms: PAUSE_TTL_MS });
    this.onTurn(turn);
  }

  resume(turn) {
    turn.isPaused = false;
    turn.lane?.resume();
    if (this.unfinished.has(turn.ctx)) this.connection.send({ type: "resume", ctx: turn.ctx });
    this.onTurn(turn);
  }

  /** @param {any} message @returns {Turn | undefined} the turn it was about */
  message(message) {
    const turn = this.unfinished.get(message.ctx);
    if (!turn) return undefined;
    turn.message(message);
    if (message.type === "flow") turn.isHeld = message.state === "pause";
    if (message.type === "ctx.done") {
      this.unfinished.delete(message.ctx);
      if (turn.frames.length && !turn.textWaits.length) this.prebuffer.addTurn(turn.late_ms);
      if (turn.isPaused && message.reason === "cancelled") {
        turn.error = {
          message: `The pause lasted longer than ${PAUSE_TTL_MS / 1000} s, so the server let the turn go.`,
        };
      }
    }
    this.onTurn(turn);
    return turn;
  }

  #audio(ctx, frame, received_ms) {
    this.audio_ms = received_ms;
    const turn = this.unfinished.get(ctx);
    if (!turn) return;
    turn.audio(frame, received_ms);
    if (!this.speaker.isRunning) this.#playout(turn, received_ms); // nothing plays: the server must not run on
    if (turn.frames.length === 1) this.onTurn(turn);
  }

  #report() {
    const now = performance.now();
    for (const turn of this.turns) {
      if (!turn.isPlaying) continue;
      turn.noteLead(now);
      this.#playout(turn, now);
    }
  }

  #playout(turn, now) {
    if (!turn.lane || !turn.isLive || !this.unfinished.has(turn.ctx) || now - turn.played_ms < PLAYOUT_MS)
      return;
    turn.played_ms = now;
    const buffered_ms = Math.round(turn.lead_ms);
    this.connection.send({ type: "playout", ctx: turn.ctx, samples: turn.lane.played, buffered_ms });
  }

  #lost(reason) {
    for (const turn of this.unfinished.values()) {
      const received_s = (turn.samples / turn.rate).toFixed(1);
      const what = turn.samples ? `after ${received_s} s of sound` : "before any sound";
      turn.fail({ message: `The connection was lost ${what}. ${reason}`, retryable: true });
    }
    this.unfinished.clear();
  }
}
