// A lane shows one response: its figures, its rounds as columns, the selected round, the text.

const TABLES = {
  hit: "hit: prepared by the draft",
  miss: "miss: the draft had prepared other outcomes",
  late: "late: the draft's table came too late",
};
const LOOKUPS = {
  ...TABLES,
  backup: "n-grams: the text repeats itself, and its earlier tokens are proposed",
  no_draft: "no draft has sent a table yet",
  none: "",
};
const MAX_COLUMNS = 4096;

export class Lane {
  constructor(section, template) {
    section.append(template.content.cloneNode(true));
    this.section = section;
    this.strip = section.querySelector(".strip");
    this.detail = section.querySelector(".detail");
    this.text = section.querySelector(".text");
    this.endLine = section.querySelector(".end");
    this.figures = Object.fromEntries(
      [...section.querySelectorAll("[data-figure]")].map((each) => [each.dataset.figure, each]),
    );
    this.strip.addEventListener("click", (event) => {
      const column = event.target.closest(".column");
      if (column) this.select(this.columnIndex(column));
    });
    this.strip.addEventListener("keydown", (event) => this.onKey(event));
    this.reset("");
  }

  /** Forget the last response; show the prompt before the text. */
  reset(prompt) {
    this.rounds = [];
    this.selected = -1;
    this.follows = true;
    this.content = "";
    this.startedAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.firstTokens = this.numTokens = 0;
    this.strip.replaceChildren();
    this.strip.style.setProperty("--cell", "10px");
    this.detail.replaceChildren();
    this.endLine.textContent = "";
    for (const figure of Object.values(this.figures)) figure.textContent = "–";
    this.text.replaceChildren(span("prompt", prompt));
  }

  /** Add the text and the rounds of one object of the stream. */
  add(text, extension) {
    const now = performance.now();
    const rounds = extension?.rounds ?? [];
    const added = rounds.reduce((sum, round) => sum + round.added.length, 0);
    if (added) {
      if (this.firstAt === null) {
        this.firstAt = now;
        this.firstTokens = added;
      }
      this.lastAt = now;
      this.numTokens += added;
    }
    this.content += text;
    this.addText(text, rounds);
    for (const round of rounds) this.addRound(round);
    this.showFigures();
  }

  /** Show why the response ended. */
  end(reason) {
    this.endLine.textContent = reason;
  }

  get speed() {
    if (this.firstAt === null || this.lastAt === this.firstAt) return null;
    return ((this.numTokens - this.firstTokens) * 1000) / (this.lastAt - this.firstAt);
  }

  showFigures() {
    const looked = this.rounds.filter((round) => round.lookup in TABLES);
    const hits = looked.filter((round) => round.lookup === "hit").length;
    const speed = this.speed;
    this.figures.speed.textContent = speed === null ? "–" : speed.toFixed(speed < 100 ? 1 : 0);
    this.figures.perRound.textContent = this.rounds.length
      ? (this.numTokens / this.rounds.length).toFixed(2)
      : "–";
    this.figures.hitRate.textContent = looked.length
      ? `${Math.round((100 * hits) / looked.length)} %`
      : "–";
    this.figures.first.textContent =
      this.firstAt === null ? "–" : `${Math.round(this.firstAt - this.startedAt)} ms`;
  }

  /** Append text, coloured by origin if the tokens spell it. */
  addText(text, rounds) {
    const isAtEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    if (rounds.map((round) => round.added.join("")).join("") === text) {
      for (const round of rounds) {
        const accepted = round.added.slice(0, round.accepted).join("");
        const bonus = round.added.slice(round.accepted).join("");
        if (accepted) this.text.append(span("accepted", accepted));
        if (bonus) this.text.append(span(round.proposed.length ? "bonus" : "", bonus));
      }
    } else if (text) {
      this.text.append(text);
    }
    if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  addRound(round) {
    this.rounds.push(round);
    const column = document.createElement("div");
    column.className = "column";
    column.setAttribute("role", "option");
    column.setAttribute("aria-selected", "false");
    column.setAttribute("aria-label", summary(round, this.rounds.length));
    column.append(
      cell(`mark ${round.proposed.length || round.lookup in TABLES ? round.lookup : "plain"}`),
      ...round.added.slice(0, round.accepted).map(() => cell("cell accepted")),
      ...round.added.slice(round.accepted).map(() => cell("cell bonus")),
      ...round.proposed.slice(round.accepted).map(() => cell("cell rejected")),
    );
    const height = Math.max(round.proposed.length, round.accepted) + 1;
    if (height > 7) this.strip.style.setProperty("--cell", `${Math.max(3, 80 / height - 2)}px`);
    this.strip.append(column);
    if (this.strip.childElementCount > MAX_COLUMNS) this.strip.firstElementChild.remove();
    if (this.follows) this.select(this.rounds.length - 1, true);
  }

  columnIndex(column) {
    const first = this.rounds.length - this.strip.childElementCount;
    return first + [...this.strip.children].indexOf(column);
  }

  /** Show the tokens of a round; the newest one is followed until another is selected. */
  select(index, follows = index === this.rounds.length - 1) {
    const first = this.rounds.length - this.strip.childElementCount;
    if (index < first || index >= this.rounds.length) return;
    this.strip.children[this.selected - first]?.setAttribute("aria-selected", "false");
    this.selected = index;
    this.follows = follows;
    const column = this.strip.children[index - first];
    column.setAttribute("aria-selected", "true");
    if (follows) this.strip.scrollLeft = this.strip.scrollWidth;
    else column.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.detail.setAttribute("aria-live", follows ? "off" : "polite");
    this.showDetail(this.rounds[index], index + 1);
  }

  showDetail(round, number) {
    const line = document.createElement("p");
    line.textContent = summary(round, number);
    const tokens = document.createElement("div");
    tokens.className = "tokens";
    tokens.append(
      ...round.added.slice(0, round.accepted).map((text) => span("token accepted", visible(text))),
      ...round.added.slice(round.accepted).map((text) => span("token bonus", visible(text))),
      ...round.proposed.slice(round.accepted).map((text) => span("token rejected", visible(text))),
    );
    this.detail.replaceChildren(line, tokens);
  }

  onKey(event) {
    const last = this.rounds.length - 1;
    const moves = { ArrowLeft: this.selected - 1, ArrowRight: this.selected + 1, Home: 0, End: last };
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    this.select(Math.min(Math.max(moves[event.key], 0), last));
  }
}

function summary(round, number) {
  const proposed = round.proposed.length;
  const tokens = `${round.added.length} ${round.added.length === 1 ? "token" : "tokens"}`;
  const parts = [`Round ${number}`, tokens];
  if (proposed) parts.push(`${round.accepted} of ${proposed} proposed accepted`);
  if (LOOKUPS[round.lookup]) parts.push(LOOKUPS[round.lookup]);
  else if (!proposed) parts.push("no proposal");
  return parts.join(" · ");
}

/** Make white space of a token visible. */
function visible(text) {
  return text === "" ? "∅" : text.replace(/ /g, "·").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}

function span(name, text) {
  const made = document.createElement("span");
  if (name) made.className = name;
  made.textContent = text;
  return made;
}

function cell(name) {
  const made = document.createElement("i");
  made.className = name;
  return made;
}
