// Asks the server which model it serves, once per connection. Knows no chat and no page.

const ANSWER_DEADLINE_MS = 8_000;

export class ServedModel {
  #name = null;

  /** @returns {Promise<string|null>} the model's name, null when the server would not say. */
  async name() {
    this.#name ??= await askForName();
    return this.#name;
  }

  /** Ask again next time: another server may answer. */
  forget() {
    this.#name = null;
  }
}

async function askForName() {
  try {
    const answer = await fetch("/v1/models", { signal: AbortSignal.timeout(ANSWER_DEADLINE_MS) });
    const { data } = await answer.json();
    return data[0].id;
  } catch {
    return null; // whoever needs the name is refused by the server, with a reason that can be shown
  }
}
