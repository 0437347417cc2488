// What the reader can do: ask, stop, regenerate, begin anew. Joins the conversation, the connection
// and the view; touches neither the socket nor the page itself.

import { Answer, endsResponse } from "./answer.js";

const CONNECT_WAIT_MS = 10_000; // then a question says that the server cannot be reached
const MESSAGE_TOO_BIG = 1009; // the WebSocket's close code

export class Chat {
  #connection;
  #model;
  #conversation;
  #view;
  #parameters;
  #answer = null; // the one under way for the reader
  #open = new Map(); // by stream_id, answers that the server has not ended; stopped ones too
  #lanes = 0;

  constructor(connection, model, conversation, view, parameters) {
    this.#connection = connection;
    this.#model = model;
    this.#conversation = conversation;
    this.#view = view;
    this.#parameters = parameters;
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
    if (!this.isAnswering) return;
    const stream_id = this.#currentLane;
    if (stream_id) this.#connection.send({ type: "response.cancel", stream_id });
    this.#answer.stop();
    this.#end();
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
    const lane = event.stream_id ?? this.#currentLane; // what has no lane is about the connection
    const answer = this.#open.get(lane);
    if (!answer) return;
    if (endsResponse(event)) this.#open.delete(lane);
    if (answer.isOver) {
      this.#receiveLate(answer, event, now);
      return;
    }
    answer.receive(event, now);
    if (answer.isOver) this.#end();
    else this.#view.showAnswer(answer);
  }

  /** The connection is gone, and with it whatever the server was doing for us. */
  lost(closeCode) {
    const wasUnderWay = this.#currentLane !== undefined;
    this.#open.clear();
    if (!wasUnderWay) return; // a question that waits for a connection may yet get one
    this.#answer.fail(closeCode === MESSAGE_TOO_BIG ? { status: 413 } : { code: "connection_lost" });
    this.#end();
  }

  get #currentLane() {
    return this.#answer?.lane;
  }

  async #begin() {
    const answer = new Answer();
    this.#answer = answer;
    this.#conversation.last.answer = answer;
    this.#view.startAnswer(answer);
    const isOpen = await this.#connection.whenOpen(CONNECT_WAIT_MS);
    const model = (isOpen && (await this.#model.name())) || undefined;
    if (answer.isOver) return; // stopped meanwhile
    // A lane of its own for each answer: what still comes for a stopped one cannot be mistaken.
    const lane = `answer-${++this.#lanes}`;
    const input = this.#conversation.input();
    const request = { type: "response.create", stream_id: lane, model, input, store: false };
    if (this.#connection.send({ ...request, ...this.#parameters() })) {
      answer.sent(lane, performance.now());
      this.#open.set(lane, answer);
      return;
    }
    answer.fail({ code: "unreachable" });
    this.#end();
  }

  #receiveLate(answer, event, now) {
    if (!endsResponse(event)) return;
    answer.count(event, now);
    // Regenerated, followed or forgotten meanwhile: then its figures are nobody's business any more.
    if (this.#conversation.last?.answer === answer) this.#view.showAnswer(answer);
  }

  #end() {
    const answer = this.#answer;
    this.#answer = null;
    this.#view.endAnswer(answer);
  }
}
