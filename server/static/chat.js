// What the reader can do: ask, stop, regenerate, begin anew. Joins the conversation, the connection
// and the view; touches neither the socket nor the page itself.

import { Answer, endsResponse } from "./answer.js";

const CONNECT_WAIT_MS = 10_000; // then a question says that the server cannot be reached
const SETTLE_WAIT_MS = 2_000; // for the server's last word on a stopped answer
const MESSAGE_TOO_BIG = 1009; // the WebSocket's close code

export class Chat {
  #connection;
  #model;
  #conversation;
  #view;
  #answer = null;
  #unsettled = null; // a stopped answer whose end the server has not confirmed, and how to tell

  constructor(connection, model, conversation, view) {
    this.#connection = connection;
    this.#model = model;
    this.#conversation = conversation;
    this.#view = view;
  }

  get isAnswering() {
    return this.#answer !== null;
  }

  /** Ask a question, unless an answer is under way. @returns {boolean} whether it was taken. */
  ask(question) {
    if (this.isAnswering || !question.trim()) return false;
    this.#view.addTurn(this.#conversation.add(question.trim()));
    this.#begin();
    return true;
  }

  /** Answer the last question again. */
  regenerate() {
    if (this.isAnswering || this.#conversation.isEmpty) return;
    this.#begin();
  }

  /** End the answer that is under way and keep what there is of it. */
  stop() {
    const answer = this.#answer;
    if (!answer) return;
    answer.stop();
    this.#end();
    if (answer.wasSent) this.#cancel(answer);
  }

  /** Forget the conversation. */
  clear() {
    this.stop();
    this.#conversation.clear();
    this.#view.clear();
  }

  /** Take in an event of the server. */
  receive(event) {
    const now = performance.now();
    if (this.#unsettled) {
      this.#settle(event, now);
      return;
    }
    const answer = this.#answer;
    if (!answer?.wasSent) return;
    answer.receive(event, now);
    this.#view.showAnswer(answer);
    if (answer.isOver) this.#end();
  }

  /** The connection is gone, and with it whatever the server was doing for us. */
  lost(closeCode) {
    this.#unsettled?.resolve();
    this.#unsettled = null;
    if (!this.#answer?.wasSent) return; // still waiting for a connection: it may yet come
    this.#answer.fail(closeCode === MESSAGE_TOO_BIG ? { status: 413 } : { code: "connection_lost" });
    this.#end();
  }

  async #begin() {
    const answer = new Answer();
    this.#answer = answer;
    this.#conversation.last.answer = answer;
    this.#view.startAnswer(answer);
    await this.#unsettled?.settled;
    const isOpen = await this.#connection.whenOpen(CONNECT_WAIT_MS);
    const model = isOpen ? await this.#model.name() : null;
    if (answer.isOver) return; // stopped meanwhile
    const input = this.#conversation.input();
    if (this.#connection.send({ type: "response.create", model: model ?? undefined, input, store: false })) {
      answer.sent(performance.now());
      return;
    }
    answer.fail({ code: "unreachable" });
    this.#end();
  }

  #end() {
    const answer = this.#answer;
    this.#answer = null;
    this.#view.endAnswer(answer);
  }

  #cancel(answer) {
    const { promise: settled, resolve } = Promise.withResolvers();
    // A server that does not answer a cancel is told by the closed connection, which always frees.
    const deadline = setTimeout(() => this.#connection.reopen(), SETTLE_WAIT_MS);
    settled.then(() => clearTimeout(deadline));
    this.#unsettled = { answer, settled, resolve };
    if (answer.responseId) this.#sendCancel(answer.responseId);
  }

  #settle(event, now) {
    const { answer, resolve } = this.#unsettled;
    // Stopped before the server had named it: cancel as soon as it has.
    if (event.type === "response.created") this.#sendCancel(event.response.id);
    if (!endsResponse(event)) return;
    answer.count(event, now);
    // Regenerated, followed or forgotten meanwhile: then its figures are nobody's business any more.
    if (this.#conversation.last?.answer === answer) this.#view.showAnswer(answer);
    this.#unsettled = null;
    resolve();
  }

  #sendCancel(responseId) {
    this.#connection.send({ type: "response.cancel", response_id: responseId });
  }
}
