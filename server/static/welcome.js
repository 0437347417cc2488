// Shows an empty chat: a lead, suggested questions, and a notice if the model cannot chat. index.html
// has the default texts; a model may have its own.

export class Welcome {
  #root;
  #lead;
  #list;
  #notice;
  #ownLead;
  #ownCards;
  #onAsk;

  /**
   * @param {Document} page
   * @param {(question: string) => void} onAsk
   */
  constructor(page, onAsk) {
    this.#root = page.getElementById("welcome");
    this.#lead = page.getElementById("lead");
    this.#list = this.#root.querySelector(".suggestions");
    this.#notice = page.getElementById("no-template");
    this.#ownLead = this.#lead.textContent;
    this.#ownCards = [...this.#list.children];
    this.#onAsk = onAsk;
    this.#list.addEventListener("click", ({ target }) => {
      const card = target.closest(".suggestion");
      if (card) this.#onAsk(card.querySelector("span").textContent);
    });
  }

  /** @param {?{lead: ?string, cards: {title: string, question: string}[], has_chat_template: boolean}} words */
  show(words) {
    this.#lead.textContent = words?.lead ?? this.#ownLead;
    const cards = words?.cards ?? [];
    this.#list.replaceChildren(...(cards.length ? cards.map((card) => this.#card(card)) : this.#ownCards));
    const canChat = words?.has_chat_template ?? true;
    this.#list.hidden = !canChat;
    this.#notice.hidden = canChat;
    this.#root.dataset.words = "shown";
  }

  #card({ title, question }) {
    const item = this.#ownCards[0].cloneNode(true);
    item.querySelector("small").textContent = title;
    item.querySelector("span").textContent = question;
    return item;
  }
}
