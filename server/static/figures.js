// From two looks at counters that only grow: what happened in between. Knows numbers, no page.

/**
 * The value below which a share of what was observed between two looks lies, in seconds.
 *
 * Within a bucket everything is taken to be spread evenly, as Prometheus does.
 *
 * @param {{bounds_s: number[], totals: number[]}} now running totals by upper bound; the last one is of all.
 * @param {{totals: number[]}} before
 * @param {number} share in (0, 1)
 * @returns {number|null} null when nothing was observed.
 */
export function quantile(now, before, share) {
  const seen = now.totals.map((total, place) => total - (before.totals[place] ?? 0));
  const all = seen.at(-1);
  if (!(all > 0)) return null;
  const wanted = share * all;
  const place = seen.findIndex((total) => total >= wanted);
  const lower = place > 0 ? now.bounds_s[place - 1] : 0;
  if (place >= now.bounds_s.length) return now.bounds_s.at(-1); // beyond all bounds: at least this
  const below = place > 0 ? seen[place - 1] : 0;
  return lower + ((now.bounds_s[place] - lower) * (wanted - below)) / (seen[place] - below);
}

/** Tokens that clients have been sent: the first ones and those after a gap. */
export function tokensOf(status) {
  return status.latencies.ttft.totals.at(-1) + status.latencies.itl.totals.at(-1);
}

/** What was counted between two looks; null if the server began anew meanwhile. */
export function between(now, before) {
  const elapsed_s = now.at_s - before.at_s;
  const tokens = tokensOf(now) - tokensOf(before);
  const prompt = now.counters.prompt_tokens - before.counters.prompt_tokens;
  const cached = now.counters.cached_prompt_tokens - before.counters.cached_prompt_tokens;
  if (!(elapsed_s > 0) || tokens < 0 || prompt < 0) return null;
  return { tokensPerSecond: tokens / elapsed_s, cachedShare: prompt > 0 ? cached / prompt : null };
}

/** The last values of something, as many as are drawn. */
export class Series {
  #values = [];
  #longest;

  constructor(longest) {
    this.#longest = longest;
  }

  /** @param {number|null} value null: nothing was to be seen. */
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
