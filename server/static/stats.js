// Times one answer: time to first token, tokens per second, tokens. Reads no clock: times come in.
// What another page has measured of it before it was left stays as it is.

const SHORTEST_MS = 5; // the browser's timers and tasks blur anything shorter

export class Meter {
  #sentMs;
  #firstMs = null;
  #lastMs = null;
  #pieces = 0;
  #usage = null;
  #before;

  /**
   * @param {number|null} nowMs when the question was sent; null where another page has sent it.
   * @param {object|null} before the figures of that page.
   */
  constructor(nowMs, before = null) {
    this.#sentMs = nowMs;
    this.#before = before;
  }

  /** Note a piece of text. */
  piece(nowMs) {
    this.#firstMs ??= nowMs;
    this.#lastMs = nowMs;
    this.#pieces += 1;
  }

  /**
   * Note the end.
   *
   * @param {number} nowMs
   * @param {object|undefined} usage what the server counted, if it said so.
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

  /** Tokens so far. Until the server has counted them, pieces of text stand for tokens. */
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

  /** All of it at this moment, as it is shown and kept. */
  figures() {
    const { ttftMs, tokensPerSecond, tokens, isExact } = this;
    const promptTokens = this.#usage?.input_tokens ?? null;
    const cachedTokens = this.#usage?.input_tokens_details?.cached_tokens ?? 0;
    return { ttftMs, tokensPerSecond, tokens, isExact, promptTokens, cachedTokens };
  }
}
