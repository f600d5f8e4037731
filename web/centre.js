// The call-centre view: many streams at once on one connection, each with its lead.

import { make } from "./dom.js";

const LINES = [
  "Good morning, you are speaking with the front desk. How can I help you today?",
  "Your parcel left the depot at six and should reach you before noon.",
  "I can move the appointment to Thursday at half past two, if that suits you.",
  "The refund of forty dollars has been sent, and will arrive within three days.",
  "Please have your customer number ready. It is printed at the top of the letter.",
  "I have reset the router for you. The light should turn green in a moment.",
  "Yes, breakfast is included, and the kitchen opens at seven on weekdays.",
  "Let me read that back to you, so that we both have the same address.",
];
const FULL_METER_MS = 5000;

export class Centre {
  /** @param {HTMLElement} list @param {import("./speech.js").Speech} speech */
  constructor(list, speech) {
    this.list = list;
    this.speech = speech;
    this.cards = []; // {turn, ...elements}
    this.listen = "0";
    list
      .closest("section")
      .addEventListener("change", ({ target }) => target.name === "listen" && this.hear(target.value));
  }

  /**
   * @param {{num: number, text: string | null, voices: string[], fields: object, input_ms: number,
   *   replaces: import("./turn.js").Turn[]}} call `text` null = a line of its own for each
   */
  start({ num, text, voices, fields, input_ms, replaces }) {
    this.list.replaceChildren();
    this.listen = this.listen === "all" || Number(this.listen) < num ? this.listen : "0";
    this.cards = Array.from({ length: num }, (_, i) => {
      const voice = fields.voice ?? voices[i % voices.length];
      const turn = this.speech.start({
        mode: "many",
        fields: voice ? { ...fields, voice } : fields,
        input_ms,
        gain: this.listen === "all" || this.listen === String(i) ? 1 : 0,
        replaces: i === 0 ? replaces : [],
      });
      this.speech.write(turn, text ?? LINES[i % LINES.length], { end: true });
      return this.#card(turn, i, voice ?? "default voice");
    });
    document.querySelector(`[name=listen][value="${this.listen}"]`).checked = true;
  }

  get heardTurn() {
    return this.cards[this.listen === "all" ? 0 : Number(this.listen)]?.turn ?? null;
  }

  hear(which) {
    this.listen = which;
    this.cards.forEach(({ turn }, i) => turn.lane?.setGain(which === "all" || which === String(i) ? 1 : 0));
    this.onHear?.();
  }

  show() {
    for (const { turn, item, bar, meter, state, numbers } of this.cards) {
      const lead_ms = turn.isLive && turn.sound_ms !== null ? turn.lead_ms : 0;
      bar.style.width = `${Math.min(100, (100 * lead_ms) / FULL_METER_MS)}%`;
      meter.setAttribute("aria-valuenow", String(Math.round(lead_ms)));
      const num = turn.underruns.length;
      item.className = turn.error || num ? "bad" : "";
      state.textContent = turn.state;
      const first = turn.ttfa_ms === null ? "" : `${Math.round(turn.ttfa_ms)} ms`;
      numbers.textContent = turn.error
        ? turn.error.message
        : [first, num ? `${num} underrun${num > 1 ? "s" : ""}` : "", `${(lead_ms / 1000).toFixed(1)} s ahead`]
            .filter(Boolean)
            .join(" · ");
    }
  }

  #card(turn, i, voice) {
    const item = make("li");
    const radio = make("input", { type: "radio", name: "listen", value: String(i) });
    const label = make("label");
    label.append(radio, ` ${i + 1} · ${voice}`);
    const state = make("span");
    const head = row(label, state);
    const line = make("span", { className: "line", textContent: turn.text });
    const bar = make("i");
    const meter = make("span", { className: "meter", role: "meter" });
    for (const [name, value] of [
      ["label", `Lead of stream ${i + 1} in milliseconds`],
      ["valuemin", "0"],
      ["valuemax", String(FULL_METER_MS)],
    ]) {
      meter.setAttribute(`aria-${name}`, value);
    }
    meter.append(bar);
    const numbers = make("span", { className: "quiet" });
    item.append(head, line, meter, numbers);
    this.list.append(item);
    return { turn, item, bar, meter, state, numbers };
  }
}

function row(...children) {
  const element = make("span", { className: "row" });
  element.append(...children);
  return element;
}
