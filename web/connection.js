// One WebSocket that comes back: state for the eye, backoff, pings, and messages by context.

import { authProtocol, readFrame } from "./wire.js";

const BACKOFF_MS = [250, 5000]; // first and longest wait; doubles in between
const LOADING_MS = 1000; // while the server says that it loads its model
const ASK_WITHIN_MS = 4000;
const JITTER = 0.25; // so that all pages do not come back in the same moment
const READY_WITHIN_MS = 8000;
const PING_MS = 5000;
const QUICK_PINGS = 12; // right after connecting: how even the network is, before anything is spoken
const QUICK_PING_MS = 150; // closer together, one late packet would hold up several
const SILENT_FOR_MS = 15_000; // pings unanswered for so long: the way is dead, whatever the socket says
const CLOSE_RESTART = 1012;

/** What close codes mean to the person in front of the page. */
const CLOSED = {
  1000: "The server closed an idle connection.",
  1006: "The connection broke off.",
  1009: "A message was too long for the server.",
  1011: "The server met an error of its own.",
  1012: "The server is restarting.",
  1013: "The server is overloaded.",
  4008: "This page read its audio too slowly for the server.",
  4400: "The server could not read this page's messages.",
  4401: "The access token has expired.",
};

/**
 * @typedef {"connecting" | "ready" | "draining" | "loading" | "waiting" | "refused"} StateName
 * @typedef {{name: StateName, detail: string, retry_ms: number}} State retry_ms: when, as performance.now()
 */

export class Connection {
  /** @param {URL} base where the page lives */
  constructor(base) {
    this.base = base;
    this.token = "";
    /** @type {State} */
    this.state = { name: "connecting", detail: "", retry_ms: 0 };
    this.session = null; // the last `session.ready`
    this.rtt_ms = null;
    this.onState = () => {};
    this.onMessage = (_message, _received_ms) => {};
    this.onAudio = (_ctx, _frame, _received_ms) => {};
    this.onLost = (_reason) => {};
    this.onPing = (_rtt_ms) => {};
    this.socket = null;
    this.attempt = 0;
    this.epoch = 0; // of the attempt under way: answers to an older one are ignored
    this.handles = new Map();
    this.timers = new Set();
    this.heard_ms = 0;
    window.addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => document.hidden || this.retryNow());
  }

  get isReady() {
    return this.socket !== null && this.state.name === "ready";
  }

  get streamUrl() {
    const url = new URL("v1/tts/stream", this.base);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.search = "";
    return url;
  }

  connect() {
    this.#clearTimers();
    this.epoch++;
    // Trying again and again keeps saying why, and does not flicker.
    if (this.attempt === 0) this.#set("connecting", "");
    else this.#set(this.state.name, this.state.detail);
    this.handles.clear();
    this.session = null;
    const protocols = ["tts1.json", ...(this.token ? [authProtocol(this.token)] : [])];
    const socket = new WebSocket(this.streamUrl, protocols);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    this.#after(READY_WITHIN_MS, () => this.session ?? this.#drop("The server took too long to answer."));
    socket.onmessage = ({ data }) => socket === this.socket && this.#receive(data, performance.now());
    socket.onclose = ({ code, reason }) => socket === this.socket && this.#closed(code, reason);
  }

  retryNow() {
    if (this.state.name === "waiting" || this.state.name === "loading") this.connect();
  }

  /** @returns {boolean} whether it went out */
  send(message) {
    if (this.socket?.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  #receive(data, received_ms) {
    this.heard_ms = received_ms;
    if (data instanceof ArrayBuffer) {
      const frame = readFrame(data);
      const ctx = this.handles.get(frame.handle);
      if (ctx !== undefined) this.onAudio(ctx, frame, received_ms);
      return;
    }
    const message = JSON.parse(data);
    switch (message.type) {
      case "session.ready":
        this.session = message;
        this.attempt = 0;
        this.#set("ready", "");
        this.#pingSoon(QUICK_PINGS);
        break;
      case "session.draining":
        this.#set("draining", "The server is about to restart; what is being spoken may finish.");
        break;
      case "pong":
        this.rtt_ms = received_ms - message.t;
        this.onPing(this.rtt_ms);
        break;
      case "ctx.started":
        this.handles.set(message.h, message.ctx);
        break;
      case "ctx.done":
        for (const [handle, ctx] of this.handles) if (ctx === message.ctx) this.handles.delete(handle);
        break;
    }
    this.onMessage(message, received_ms);
  }

  #pingSoon(numQuick) {
    this.#after(numQuick > 0 ? QUICK_PING_MS : PING_MS, () => {
      const now = performance.now();
      if (now - this.heard_ms > SILENT_FOR_MS) return this.#drop("The server stopped answering.");
      // A hidden page lets an idle connection end; it comes back when somebody looks.
      if (!document.hidden) this.send({ type: "ping", t: now });
      this.#pingSoon(numQuick - 1);
    });
  }

  #drop(reason) {
    const socket = this.socket;
    this.socket = null; // its own close event may take a minute to come
    socket?.close();
    this.#lost(reason, 0);
  }

  #closed(code, reason) {
    const meaning = CLOSED[code] ?? `The server closed the connection (${code}).`;
    this.socket = null;
    this.#lost(reason && code !== CLOSE_RESTART ? `${meaning} ${reason}` : meaning, code);
  }

  async #lost(reason, code) {
    this.#clearTimers();
    this.handles.clear();
    const wasOpen = this.session !== null;
    this.session = null;
    this.onLost(reason);
    if (wasOpen) return this.#wait("waiting", reason, code === CLOSE_RESTART ? 0 : this.#nextWait());
    const epoch = ++this.epoch;
    const { name, detail } = await this.#ask();
    if (epoch !== this.epoch) return;
    if (name === "refused")
      this.#set(name, detail); // trying again can't help before somebody acts
    else this.#wait(name, detail, name === "loading" ? LOADING_MS : this.#nextWait());
    this.attempt ||= 1;
  }

  #nextWait() {
    const [first, longest] = BACKOFF_MS;
    const wait = Math.min(longest, first * 2 ** this.attempt++);
    return wait * (1 - JITTER + 2 * JITTER * Math.random());
  }

  #wait(name, detail, wait_ms) {
    this.#set(name, detail, performance.now() + wait_ms);
    this.#after(wait_ms, () => this.connect());
  }

  /** Why there is no way in: a browser does not tell why an upgrade was refused, plain HTTP does. */
  async #ask() {
    const say = (name, detail) => ({ name, detail });
    try {
      const ready = await this.#get("readyz");
      if (ready.status === 503) {
        const { status } = await ready.json();
        const isLoading = status === "loading";
        return say("loading", isLoading ? "The server is loading its model." : `The server is ${status}.`);
      }
      const models = await this.fetchModels();
      if (models.status === 401) {
        return say(
          "refused",
          this.token ? "The access token is wrong." : "This server asks for an access token.",
        );
      }
      return say(
        "waiting",
        "The server refused the connection: all are taken, or this origin is not allowed.",
      );
    } catch {
      return say("waiting", "The server can't be reached. Is it running?");
    }
  }

  #get(path, headers = {}) {
    const signal = AbortSignal.timeout(ASK_WITHIN_MS);
    return fetch(new URL(path, this.base), { cache: "no-store", headers, signal });
  }

  /** GET /v1/models with the token, if there is one. */
  fetchModels() {
    return this.#get("v1/models", this.token ? { Authorization: `Bearer ${this.token}` } : {});
  }

  #set(name, detail, retry_ms = 0) {
    this.state = { name, detail, retry_ms };
    this.onState();
  }

  #after(delay_ms, action) {
    const timer = setTimeout(() => {
      this.timers.delete(timer);
      action();
    }, delay_ms);
    this.timers.add(timer);
  }

  #clearTimers() {
    for (const timer of this.timers) clearTimeout(timer);
    this.timers.clear();
  }
}
