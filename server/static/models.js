// Requests the served models, once per connection.

const ANSWER_DEADLINE_MS = 8_000;
const REFUSED = [401, 403]; // no key or a wrong one; or a disabled tenant

export class Models {
  #asked = null;
  #headers;
  #wanted;

  /**
   * @param {() => object} headers the headers of each request.
   * @param {() => string} wanted the name that the user chose, or an empty string.
   */
  constructor(headers, wanted) {
    this.#headers = headers;
    this.#wanted = wanted;
  }

  /** @returns {Promise<string[]>} all names; none if the server does not answer. */
  async names() {
    return (await this.#known()).map(({ id }) => id);
  }

  /** @returns {Promise<string[]>} one name of each model, which may have several. */
  async own() {
    return [...new Set((await this.#known()).map(({ id, root }) => root ?? id))];
  }

  /**
   * @param {string|null} picked the conversation's model, or null.
   * @returns {Promise<string|null>} the model to ask: the picked one, the chosen one, or the first that is served.
   */
  async name(picked = null) {
    const names = await this.names();
    return [picked, this.#wanted()].find((name) => names.includes(name)) ?? names[0] ?? null;
  }

  /** @returns {Promise<object|null>} the page's texts for the model to ask; null for the default texts. */
  async words(picked = null) {
    const name = await this.name(picked);
    return (await this.#known()).find(({ id }) => id === name)?.page ?? null;
  }

  /** @returns {Promise<boolean>} whether the server needs a valid key. */
  async wantsKey() {
    try {
      const signal = AbortSignal.timeout(ANSWER_DEADLINE_MS);
      return REFUSED.includes((await fetch("/v1/models", { headers: this.#headers(), signal })).status);
    } catch {
      return false; // no server to refuse
    }
  }

  /** Request again next time, because another server may answer. */
  forget() {
    this.#asked = null;
  }

  async #known() {
    for (;;) {
      const asked = (this.#asked ??= askForModels(this.#headers()));
      const cards = await asked;
      if (asked !== this.#asked) continue; // an answer of the old server
      if (cards === null) this.#asked = null;
      return cards ?? [];
    }
  }
}

async function askForModels(headers) {
  try {
    const answer = await fetch("/v1/models", { headers, signal: AbortSignal.timeout(ANSWER_DEADLINE_MS) });
    const { data } = await answer.json();
    return data.filter(({ id }) => typeof id === "string");
  } catch {
    return null; // the server then refuses the request with a reason
  }
}
