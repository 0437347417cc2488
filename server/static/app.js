// Entry point of the chat page: creates its parts and connects their callbacks.

import { Chat } from "./chat.js";
import { ChatList } from "./chat_list.js";
import { Chats } from "./chats.js";
import { Composer } from "./composer.js";
import { Connection, ConnectionState } from "./connection.js";
import { Header } from "./header.js";
import { keyHeaders, keyProtocols } from "./keys.js";
import { Models } from "./models.js";
import { Settings } from "./settings.js";
import { ChatStore } from "./store.js";
import { keepUnderWay, takeUnderWay } from "./under_way.js";
import { View } from "./view.js";
import { Welcome } from "./welcome.js";

const REFUSED = 1006; // the close code of a connection that was never open
const NEEDS_KEY = "This server needs an API key. Its operator creates one with `triolet tenant add`.";
const WRONG_KEY = "This server refuses the API key below: it is wrong, disabled or expired. Enter another one.";
const KEY_NEEDED = "This server needs an API key: enter one in the settings.";
const KEY_REFUSED = "This server refuses the API key: enter another one in the settings.";

const url = new URL("/v1/responses", location.href);
url.protocol = url.protocol.replace("http", "ws");

const header = new Header(document, (model) => {
  chat.pick(model);
  showModel();
});
const view = new View(document);
const settings = new Settings(document, { onKey: useKey, onModel: showModel });
const models = new Models(() => keyHeaders(settings.key), () => settings.model);
const connection = new Connection(url.href, () => keyProtocols(settings.key), {
  onState: connectionChanged,
  onEvent: (event) => chat.receive(event),
});
const chat = new Chat(connection, models, view, () => settings.parameters(), (conversation) => chats.keep(conversation));
const store = new ChatStore(() => localStorage, (id) => chats.changedElsewhere(id));
const list = new ChatList(document, {
  onOpen: (id) => chats.open(id),
  onRename: (id, title) => chats.rename(id, title),
  onRemove: (id) => chats.remove([id]),
  onRemoveAll: () => chats.removeAll(),
  onUndo: () => chats.undo(),
});
const chats = new Chats(store, list, chat);
const composer = new Composer(document, {
  onAsk: (question) => chat.ask(question),
  onAskInstead: (question) => chat.askInstead(question),
  onStop: () => chat.stop(),
});

const welcome = new Welcome(document, (question) => {
  chat.ask(question);
  composer.focus();
});

view.connect({
  onShow() {
    composer.cancelEditing();
    showModel(); // each chat has its own
  },
  onRegenerate() {
    chat.regenerate();
    composer.focus();
  },
  onEdit: (question) => composer.edit(question),
  onNewChat: newChat,
  onBusy: (isBusy) => composer.setBusy(isBusy),
});
for (const button of document.querySelectorAll(".new-chat")) button.onclick = newChat;
document.getElementById("reconnect").onclick = () => connection.connect();
document.getElementById("enter-key").onclick = askForKey;
addEventListener("online", () => connection.connect());
addEventListener("popstate", () => chats.openByAddress());
addEventListener("storage", (event) => store.changedElsewhere(event));
addEventListener("pagehide", () => keepUnderWay(chat.leave()));
addEventListener("pageshow", ({ persisted }) => persisted && takeUnderWay()); // restored from the back/forward cache
chats.resume(takeUnderWay());
chats.openByAddress();
connection.connect();

function newChat() {
  list.close();
  chats.begin();
  composer.focus();
}

function askForKey() {
  settings.open(settings.key ? WRONG_KEY : NEEDS_KEY);
}

function useKey() {
  connection.isRefused = false; // the new key has not been tried yet
  connection.connect();
}

async function connectionChanged(state, closeCode) {
  header.showConnection(state);
  if (state === ConnectionState.WAITING) {
    chat.lost(closeCode);
    const { key } = settings;
    // A refused handshake looks like any other failure from here.
    const isRefused = closeCode === REFUSED && (await models.wantsKey());
    if (connection.isOpen || key !== settings.key) return; // no longer relevant
    const isNews = isRefused && !connection.isRefused;
    connection.isRefused = isRefused;
    header.showTrouble(isRefused ? (key ? KEY_REFUSED : KEY_NEEDED) : null);
    if (isNews) askForKey(); // once: the user may have closed it
  }
  if (state === ConnectionState.OPEN) {
    models.forget(); // earlier answers may be of another server
    chat.reconnected();
    settings.offer(await models.names());
    await showModel();
  }
}

async function showModel() {
  if (!connection.isOpen) return;
  const picked = chat.model;
  const [name, names, words] = [await models.name(picked), await models.own(), await models.words(picked)];
  if (picked !== chat.model) return; // another chat is shown now
  header.showModel(name, names);
  welcome.show(words);
}
