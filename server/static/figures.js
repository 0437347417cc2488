// Computes rates and quantiles from a server's counters of the last seconds, and formats figures.

const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
export const plain = (value) => number.format(value);
export const percent = (value) => `${number.format(100 * value)} %`;
export const time = (seconds) => (seconds < 1 ? `${number.format(1000 * seconds)} ms` : `${number.format(seconds)} s`);
export const minutes = (value) => `${number.format(value)} min`;

/**
 * A quantile of a histogram, in seconds.
 *
 * Interpolates linearly within a bucket, as Prometheus does.
 *
 * @param {{bounds_s: number[], totals: number[]}} histogram running totals by upper bound; the last one is of all.
 * @param {number} share in (0, 1)
 * @returns {number|null} null when nothing was observed.
 */
export function quantile({ bounds_s, totals }, share) {
  const all = totals.at(-1);
  if (!(all > 0)) return null;
  const wanted = share * all;
  const place = totals.findIndex((total) => total >= wanted);
  const lower = place > 0 ? bounds_s[place - 1] : 0;
  if (place >= bounds_s.length) return bounds_s.at(-1); // above all bounds: at least this
  const below = place > 0 ? totals[place - 1] : 0;
  return lower + ((bounds_s[place] - lower) * (wanted - below)) / (totals[place] - below);
}

/** Tokens sent to clients: first tokens and those after a gap. */
export function tokensOf({ latencies }) {
  return latencies.ttft.totals.at(-1) + latencies.itl.totals.at(-1);
}

/** Rates of the last seconds; null without data. */
export function ratesOf(recent) {
  const { prompt_tokens, cached_prompt_tokens } = recent.counters;
  return {
    tokensPerSecond: recent.seconds > 0 ? tokensOf(recent) / recent.seconds : null,
    cachedShare: prompt_tokens > 0 ? cached_prompt_tokens / prompt_tokens : null,
  };
}

/** Whether another process answers now, with counters from zero. */
export function isAnother(now, before) {
  return tokensOf(now) < tokensOf(before);
}

/** The last values of a series, as many as are drawn. */
export class Series {
  #values = [];
  #longest;

  constructor(longest) {
    this.#longest = longest;
  }

  /** @param {number|null} value null: no data. */
  add(value) {
    this.#values.push(value);
    if (this.#values.length > this.#longest) this.#values.shift();
  }

  get values() {
    return this.#values;
  }

  clear() {
    this.#values = [];
  }
}
