// Asks the server which model it serves, once per connection. Knows no chat and no page.

const ANSWER_DEADLINE_MS = 8_000;

export class ServedModel {
  #name = null;
  #headers;

  /** @param {() => object} headers what each request carries. */
  constructor(headers) {
    this.#headers = headers;
  }

  /** @returns {Promise<string|null>} the model's name, null when the server would not say. */
  async name() {
    this.#name ??= await askForName(this.#headers());
    return this.#name;
  }

  /** @returns {Promise<boolean>} whether the server refuses for want of a key. */
  async wantsKey() {
    try {
      const signal = AbortSignal.timeout(ANSWER_DEADLINE_MS);
      return (await fetch("/v1/models", { headers: this.#headers(), signal })).status === 401;
    } catch {
      return false; // nobody is there to refuse
    }
  }

  /** Ask again next time: another server may answer. */
  forget() {
    this.#name = null;
  }
}

async function askForName(headers) {
  try {
    const answer = await fetch("/v1/models", { headers, signal: AbortSignal.timeout(ANSWER_DEADLINE_MS) });
    const { data } = await answer.json();
    return data[0].id;
  } catch {
    return null; // whoever needs the name is refused by the server, with a reason that can be shown
  }
}
