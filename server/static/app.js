// Puts the page together: who hears from whom. Decides nothing.

import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Connection, ConnectionState } from "./connection.js";
import { Conversation } from "./conversation.js";
import { Header } from "./header.js";
import { ServedModel } from "./model.js";
import { Settings, keyHeaders, keyProtocols } from "./settings.js";
import { View } from "./view.js";

const REFUSED = 1006; // the close code of a connection that was never one
const NEEDS_KEY = "This server asks for an API key. Whoever runs it makes one with `triolet keys issue`.";

const url = new URL("/v1/responses", location.href);
url.protocol = url.protocol.replace("http", "ws");

const header = new Header(document);
const view = new View(document);
const settings = new Settings(document, { onKey: () => connection.connect() });
const model = new ServedModel(() => keyHeaders(settings.key));
const connection = new Connection(url.href, () => keyProtocols(settings.key), {
  onState: connectionChanged,
  onEvent: (event) => chat.receive(event),
});
const chat = new Chat(connection, model, new Conversation(), view, () => settings.parameters());
const composer = new Composer(document, {
  onAsk: (question) => chat.ask(question),
  onStop: () => chat.stop(),
});

view.connect({
  onRegenerate() {
    chat.regenerate();
    composer.focus();
  },
  onNewChat: newChat,
  onBusy: (isBusy) => composer.setBusy(isBusy),
});
document.getElementById("new-chat").onclick = newChat;
document.getElementById("reconnect").onclick = () => connection.connect();
for (const suggestion of document.querySelectorAll(".suggestion")) {
  suggestion.onclick = () => {
    chat.ask(suggestion.querySelector("span").textContent);
    composer.focus();
  };
}
addEventListener("online", () => connection.connect());
connection.connect();

function newChat() {
  chat.clear();
  composer.focus();
}

async function connectionChanged(state, closeCode) {
  header.showConnection(state);
  if (state === ConnectionState.WAITING) {
    model.forget();
    chat.lost(closeCode);
    // A refused handshake looks like any other failure from here.
    if (closeCode === REFUSED && (await model.wantsKey())) settings.open(NEEDS_KEY);
  }
  if (state === ConnectionState.OPEN) header.showModel(await model.name());
}
