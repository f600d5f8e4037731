// Where text comes from: a simulated language model, or somebody typing.

/** Words with the white space before them; joined they are the text again. @param {string} text */
export function tokensOf(text) {
  return text.match(/\s*\S+(?:\s+$)?/gu) ?? (text ? [text] : []);
}

/** Writes tokens at the pace of a language model, until stopped. */
export class TokenStream {
  /**
   * @param {string} text
   * @param {{tokens_per_s: number, jitter: number}} pace jitter: each pause is up to this share longer or
   *   shorter
   * @param {(token: string, isLast: boolean) => void} write
   * @param {() => boolean} isHeld the server asks for no more at the moment
   */
  constructor(text, { tokens_per_s, jitter }, write, isHeld) {
    this.tokens = tokensOf(text);
    this.interval_ms = 1000 / tokens_per_s;
    this.jitter = jitter;
    this.write = write;
    this.isHeld = isHeld;
    this.due_ms = performance.now();
    this.timer = 0;
    this.#run();
  }

  stop() {
    clearTimeout(this.timer);
  }

  #run() {
    // Timers are late, and once a second in a hidden tab: everything due by now goes out.
    while (this.tokens.length && this.due_ms <= performance.now() && !this.isHeld()) {
      this.write(this.tokens.shift(), this.tokens.length === 0);
      this.due_ms += this.interval_ms * (1 + this.jitter * (2 * Math.random() - 1));
    }
    if (!this.tokens.length) return;
    if (this.isHeld()) this.due_ms = performance.now() + this.interval_ms;
    this.timer = setTimeout(() => this.#run(), Math.max(1, this.due_ms - performance.now()));
  }
}

const ONLY_FORWARD =
  "Live typing only goes forward: what was sent may be spoken already. Enter ends the turn.";

/**
 * Turns what is typed into deltas: text only ever grows, since what was sent may be spoken already.
 * A pause flushes; the next keystroke goes on in the same turn.
 */
export class LiveTyping {
  /**
   * @param {HTMLTextAreaElement} box
   * @param {{isActive: () => boolean, flush_ms: () => number, write: (delta: string, at_ms: number) => void,
   *   flush: () => void, refused: (why: string) => void}} hooks
   */
  constructor(box, hooks) {
    this.box = box;
    this.hooks = hooks;
    this.sent = "";
    this.timer = 0;
    box.addEventListener("beforeinput", (event) => this.#guard(event));
    box.addEventListener("input", (event) => this.#input(event));
    box.addEventListener("compositionend", (event) => this.#send(event.timeStamp));
  }

  /** A new turn: what stands in the box belongs to the one before. */
  reset(text = "") {
    clearTimeout(this.timer);
    this.sent = text;
  }

  #guard(event) {
    if (!this.hooks.isActive() || event.isComposing) return;
    const { selectionStart, selectionEnd } = this.box;
    const touchesSent = Math.min(selectionStart, selectionEnd) < this.sent.length;
    const deletes = event.inputType.startsWith("delete") && selectionStart <= this.sent.length;
    if ((touchesSent || deletes) && this.sent) {
      event.preventDefault();
      this.hooks.refused(ONLY_FORWARD);
    }
  }

  #input(event) {
    if (this.hooks.isActive() && !event.isComposing) this.#send(event.timeStamp);
  }

  #send(at_ms) {
    if (!this.hooks.isActive()) return;
    if (!this.box.value.startsWith(this.sent)) {
      this.box.value = this.sent; // an undo, say: what was said can't be unsaid
      this.hooks.refused(ONLY_FORWARD);
      return;
    }
    const delta = this.box.value.slice(this.sent.length);
    if (!delta) return;
    this.sent = this.box.value;
    this.hooks.write(delta, at_ms);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hooks.flush(), this.hooks.flush_ms());
  }
}
