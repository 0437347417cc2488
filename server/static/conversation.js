// What was said: questions and their answers, and the model's input made from them. Knows no socket
// and no page.

export class Conversation {
  #turns = [];

  get isEmpty() {
    return this.#turns.length === 0;
  }

  get last() {
    return this.#turns.at(-1);
  }

  /** Add a question. @returns the new turn. */
  add(question) {
    const turn = { question, answer: null };
    this.#turns.push(turn);
    return turn;
  }

  clear() {
    this.#turns = [];
  }

  /**
   * The whole input for answering the last question.
   *
   * Earlier turns whose answer is empty (it failed, or was stopped before it began) are left out with
   * their question: chat templates want questions and answers to alternate.
   */
  input() {
    const earlier = this.#turns.slice(0, -1).filter(({ answer }) => answer?.text);
    const messages = earlier.flatMap(({ question, answer }) => [
      message("user", question),
      message("assistant", answer.text),
    ]);
    return [...messages, message("user", this.last.question)];
  }
}

function message(role, content) {
  return { type: "message", role, content };
}
