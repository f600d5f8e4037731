// The table of turns, with percentiles, and the ways to take a turn along.

import { make } from "./dom.js";

const SHOWN = 50;
const MEASURES = ["sound_after_ms", "ttfa_ms", "server_ms", "network_ms"];
const COLUMNS = ["words", "words", "", "", "", "", "underruns", ""];
const ACTIONS = [
  ["wav", "WAV", "Download the sound"],
  ["probe", "probe", "Copy as a realtime probe command"],
  ["python", "Python", "Copy as a Python program"],
];

export class History {
  /** @param {HTMLTableElement} table @param {(action: "wav" | "probe" | "python", turn: any) => void} onAction */
  constructor(table, onAction) {
    this.body = table.tBodies[0];
    this.foot = table.tFoot;
    this.onAction = onAction;
    this.rows = new WeakMap();
  }

  /** @param {import("./turn.js").Turn[]} turns */
  show(turns) {
    const rows = turns
      .slice(-SHOWN)
      .reverse()
      .map((turn) => this.#row(turn));
    // Rows stay the same elements, so that a button keeps the focus while numbers come in.
    if (rows[0] !== this.body.rows[0]) this.body.replaceChildren(...rows);
    const measured = turns.filter((turn) => turn.ttfa_ms !== null);
    this.foot.replaceChildren(...(measured.length > 1 ? [summary(measured, 50), summary(measured, 95)] : []));
  }

  #row(turn) {
    let row = this.rows.get(turn);
    if (!row) {
      row = make("tr");
      row.append(...COLUMNS.map((name) => make("td", { className: name })), this.#actions(turn));
      this.rows.set(turn, row);
    }
    const told = turn.error ? `${turn.state}: ${turn.error.message}` : turn.state;
    const underruns = turn.frames.length ? String(turn.underruns.length) : "–";
    const length = turn.samples ? `${(turn.samples / turn.rate).toFixed(1)} s` : "–";
    const texts = [
      `${turn.ctx.slice(1)} ${told}`,
      turn.text,
      ...MEASURES.map((name) => ms(turn[name])),
      underruns,
      length,
    ];
    texts.forEach((text, i) => row.cells[i].textContent === text || (row.cells[i].textContent = text));
    row.cells[1].title = turn.text.slice(0, 300);
    row.cells[COLUMNS.indexOf("underruns")].classList.toggle("bad", turn.underruns.length > 0);
    row.querySelector("button").disabled = !turn.chunks?.length;
    return row;
  }

  #actions(turn) {
    const actions = make("td");
    for (const [action, label, meaning] of ACTIONS) {
      const button = make("button", { type: "button", textContent: label, title: meaning });
      button.setAttribute("aria-label", `${meaning}, turn ${turn.ctx.slice(1)}`);
      button.onclick = () => this.onAction(action, turn);
      actions.append(button);
    }
    return actions;
  }
}

/** Nearest rank: a value that was really measured. @param {number[]} values @param {number} percent */
export function percentile(values, percent) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil((percent / 100) * sorted.length) - 1)];
}

function summary(turns, percent) {
  const row = make("tr");
  const head = make("th", { scope: "row", textContent: `p${percent}` });
  const numbers = MEASURES.map((name) => {
    const values = turns.map((turn) => turn[name]).filter((value) => value !== null);
    return cell(ms(values.length ? percentile(values, percent) : null));
  });
  row.append(head, cell(`of ${turns.length} turns`), ...numbers, cell(""), cell(""), cell(""));
  return row;
}

function ms(value) {
  return value === null ? "–" : `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

function cell(text) {
  return make("td", { textContent: text });
}
