// Where in its text a turn is, by what has been played.
//
// The server tells word times where it can. Where it does not, the place is estimated: segment ends and
// the end of the turn are known points, between them (and ahead of them) characters pass evenly.

import { make } from "./dom.js";

const CHARS_PER_S = 15; // of English speech, until the turn itself tells better

/** @typedef {{c0: number, c1: number, isEstimate: boolean}} Place code points into the turn's text */

/**
 * @param {{words: any[], hasEstimates: boolean, anchors: {samples: number, c1: number}[], rate: number,
 *   numChars: number}} turn
 * @param {number} samples played
 * @returns {Place}
 */
export function placeAt(turn, samples) {
  return turn.words.length > 0 ? byWords(turn, samples) : byPosition(turn, samples);
}

function byWords({ words, hasEstimates, rate }, samples) {
  const now_ms = (samples / rate) * 1000;
  let spoken = 0;
  let word = null;
  for (const entry of words) {
    if (entry[1] > now_ms) break;
    word = entry;
    spoken = entry[3];
  }
  if (!word) return { c0: 0, c1: 0, isEstimate: hasEstimates };
  const isOver = word[2] < now_ms;
  return { c0: isOver ? word[4] : spoken, c1: word[4], isEstimate: hasEstimates };
}

function byPosition({ anchors, rate, numChars }, samples) {
  let before = { samples: 0, c1: 0 };
  for (const anchor of anchors) {
    if (anchor.samples > samples && anchor.samples > before.samples) {
      const share = (samples - before.samples) / (anchor.samples - before.samples);
      const place = before.c1 + share * (anchor.c1 - before.c1);
      return { c0: Math.floor(place), c1: Math.floor(place) + 1, isEstimate: true };
    }
    before = anchor;
  }
  const pace = before.samples > rate ? before.c1 / before.samples : CHARS_PER_S / rate;
  const place = Math.min(numChars, before.c1 + pace * (samples - before.samples));
  return { c0: Math.floor(place), c1: Math.min(numChars, Math.floor(place) + 1), isEstimate: true };
}

/** The text of a turn on the page, as spans of words that can be marked. */
export class Transcript {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.element.replaceChildren();
    this.spans = []; // {element, c0, c1}
    this.numChars = 0;
    this.openWord = false; // the last span may still grow
  }

  /** @param {string} text */
  append(text) {
    for (const piece of text.match(/\s+|\S+/gu) ?? []) {
      const isSpace = /^\s/u.test(piece);
      const count = [...piece].length;
      const last = this.spans.at(-1);
      if (!isSpace && this.openWord && last) {
        last.element.textContent += piece;
        last.c1 += count;
      } else if (isSpace) {
        this.element.append(piece);
      } else {
        const element = make("span");
        element.textContent = piece;
        this.element.append(element);
        this.spans.push({ element, c0: this.numChars, c1: this.numChars + count });
      }
      this.openWord = !isSpace;
      this.numChars += count;
    }
  }

  /** @param {Place} place */
  mark({ c0, c1 }) {
    for (const span of this.spans) {
      const name = span.c1 <= c0 ? "spoken" : span.c0 < c1 ? "now" : "";
      if (span.element.className !== name) span.element.className = name;
    }
  }
}
