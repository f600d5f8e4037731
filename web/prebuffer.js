// How much sound to hold before playing: little on a quiet network, more where packets come unevenly.
//
// Two things are known before a frame is late: how far the round trips of pings spread, and how late
// frames were in the turns before.

const LEAST_MS = 60;
const MOST_MS = 1000; // a network slower than the sound is not helped by waiting longer
const NUM_PINGS = 16;
const HICCUP_MS = 20; // of a busy page: no fault of the network
const MARGIN = 1.5; // a dozen pings do not meet the worst
const MOST_LATE_MS = 120; // learnt from a late turn: more would trade the quick start for a gap that may not come
const MEMORY = 0.5; // of a late turn, from one turn to the next

export class Prebuffer {
  constructor() {
    /** Set by the user; null = adaptive. @type {number | null} */
    this.fixed_ms = null;
    this.late_ms = 0;
    /** @type {number[]} */
    this.rtts_ms = [];
  }

  /** @param {number} rtt_ms */
  addPing(rtt_ms) {
    this.rtts_ms = [...this.rtts_ms, rtt_ms].slice(-NUM_PINGS);
  }

  /** @param {number} late_ms how late a frame was at worst, for a player that starts with the first one */
  addTurn(late_ms) {
    this.late_ms = Math.max(Math.min(late_ms, MOST_LATE_MS), this.late_ms * MEMORY, 0);
  }

  /** Most round trips less the fastest; one outlier (a busy page) does not count. */
  get spread_ms() {
    const sorted = [...this.rtts_ms].sort((a, b) => a - b);
    return sorted.length < 3 ? 0 : sorted[sorted.length - 2] - sorted[0];
  }

  get target_ms() {
    if (this.fixed_ms !== null) return this.fixed_ms;
    const uneven_ms = MARGIN * Math.max(0, this.spread_ms - HICCUP_MS);
    return Math.round(Math.min(MOST_MS, LEAST_MS + Math.max(uneven_ms, this.late_ms)));
  }
}
