// Measures one answer: time to first token, tokens per second, tokens. Times are passed in. Figures
// that a page measured before a reload are kept.

const SHORTEST_MS = 5; // shorter times are within the browser's timer resolution

export class Meter {
  #sentMs;
  #firstMs = null;
  #lastMs = null;
  #pieces = 0;
  #usage = null;
  #before;

  /**
   * @param {number|null} nowMs when the question was sent; null if an earlier page has sent it.
   * @param {object|null} before the figures of that page.
   */
  constructor(nowMs, before = null) {
    this.#sentMs = nowMs;
    this.#before = before;
  }

  /** Record a piece of text. */
  piece(nowMs) {
    this.#firstMs ??= nowMs;
    this.#lastMs = nowMs;
    this.#pieces += 1;
  }

  /**
   * Record the end.
   *
   * @param {number} nowMs
   * @param {object|undefined} usage the server's counts, if any.
   */
  end(nowMs, usage) {
    if (usage?.output_tokens === undefined) return;
    this.#usage = usage;
    if (this.#firstMs !== null) this.#lastMs = nowMs;
  }

  /** Milliseconds from sending to the first text, null before that. */
  get ttftMs() {
    if (this.#sentMs === null) return this.#before?.ttftMs ?? null;
    return this.#firstMs === null ? null : this.#firstMs - this.#sentMs;
  }

  /** Tokens so far. Until the server has counted them, pieces of text are counted. */
  get tokens() {
    return this.#usage?.output_tokens ?? (this.#before?.tokens ?? 0) + this.#pieces;
  }

  /** Whether `tokens` is the server's own count; otherwise it is a lower bound. */
  get isExact() {
    return this.#usage !== null;
  }

  /** Tokens per second after the first one, null while the interval is too short to measure. */
  get tokensPerSecond() {
    const intervalMs = this.#lastMs - this.#firstMs;
    if (this.#sentMs === null) return this.#before?.tokensPerSecond ?? null; // a replay after a reload arrives in one burst
    if (this.tokens < 2 || intervalMs < SHORTEST_MS) return null;
    return ((this.tokens - 1) * 1000) / intervalMs;
  }

  /** All figures at this moment, to show and to store. */
  figures() {
    const { ttftMs, tokensPerSecond, tokens, isExact } = this;
    const promptTokens = this.#usage?.input_tokens ?? null;
    const cachedTokens = this.#usage?.input_tokens_details?.cached_tokens ?? 0;
    return { ttftMs, tokensPerSecond, tokens, isExact, promptTokens, cachedTokens };
  }
}
