// The list of requests: a bar of tokens and a strip of time each, and the timeline of the one that was chosen.

const STRIP_SECONDS = 60;
export const PALETTE_SIZE = 8;
export const colorOf = (sequence) => `var(--c${sequence % PALETTE_SIZE})`;

const WHY = { cells: "no cells", slots: "gave up its slot", restart: "the engine restarts" };

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Spans [kind, from, until] of a request's life; the open one ends now. */
export function spans(request, now) {
  const end = request.ended_at ?? now;
  const found = [];
  const started = request.started_at ?? end;
  if (started > request.accepted_at) found.push(["queue", request.accepted_at, started]);
  if (request.started_at === null) return found;
  let from = started;
  const first = request.first_token_at;
  const busy = (until) => {
    if (first === null || first >= until) found.push(["prefill", from, until]);
    else if (first <= from) found.push(["run", from, until]);
    else found.push(["prefill", from, first], ["run", first, until]);
  };
  for (const [start, stop] of request.pauses) {
    if (start > from) busy(start);
    found.push(["parked", start, stop ?? end]);
    from = stop ?? end;
  }
  if (end > from) busy(end);
  return found;
}

function place(bar, parts, from, length) {
  while (bar.children.length > parts.length) bar.lastChild.remove();
  parts.forEach(([kind, start, stop], index) => {
    const part = bar.children[index] ?? bar.appendChild(element("i"));
    const left = Math.max(0, (start - from) / length);
    const right = Math.min(1, (stop - from) / length);
    part.className = `s-${kind}`;
    part.style.left = `${100 * left}%`;
    part.style.width = `${100 * Math.max(0, right - left)}%`;
  });
}

export class Requests {
  constructor(byId) {
    this.byId = byId;
    this.list = byId("requests");
    this.rows = new Map();
    this.chosen = null;
    this.snapshot = null;
    this.list.addEventListener("click", (event) => this.open(event.target.closest(".row")));
    this.list.addEventListener("keydown", (event) => this.move(event));
    byId("timeline").addEventListener("close", () => (this.chosen = null));
  }

  show(snapshot) {
    this.snapshot = snapshot;
    const { requests } = snapshot;
    const ended = requests.filter((request) => request.state === "ended").reverse();
    const ordered = [...requests.filter((request) => request.state !== "ended"), ...ended];
    const scale = Math.max(64, ...ordered.map((request) => request.prompt + (request.max_tokens ?? request.generated)));
    const begin = this.stripBegin(ordered, snapshot.now);
    const seen = new Set();
    ordered.forEach((request, index) => {
      seen.add(request.sequence);
      const row = this.rows.get(request.sequence) ?? this.make(request);
      this.fill(row, request, scale, begin, snapshot.now);
      if (this.list.children[index] !== row.root) this.list.insertBefore(row.root, this.list.children[index] ?? null);
    });
    for (const [sequence, row] of this.rows) {
      if (!seen.has(sequence)) {
        row.root.remove();
        this.rows.delete(sequence);
      }
    }
    this.byId("no-requests").hidden = ordered.length > 0;
    this.byId("not-shown").hidden = !snapshot.not_shown;
    this.byId("not-shown").textContent = `and ${snapshot.not_shown} more that wait`;
    if (this.chosen !== null) this.showTimeline();
  }

  /** All strips are on one axis, from the oldest live request's start or a minute ago. */
  stripBegin(requests, now) {
    const live = requests.filter((request) => request.state !== "ended");
    const oldest = Math.min(now - 5, ...(live.length ? live : requests).map((request) => request.accepted_at));
    return Math.max(oldest, now - STRIP_SECONDS);
  }

  make(request) {
    const root = element("button", "row");
    root.type = "button";
    root.dataset.sequence = request.sequence;
    root.style.setProperty("--own", colorOf(request.sequence));
    const row = { root };
    const name = element("span", "name");
    name.append(element("i", "dot"), element("b", "", `#${request.sequence}`), (row.id = element("span", "id")));
    row.bars = element("span", "bars");
    row.bars.append((row.tokens = element("span", "bar")), (row.strip = element("span", "strip")));
    const facts = element("span", "facts");
    facts.append((row.state = element("span", "chip")), (row.count = element("span", "count")), (row.age = element("span", "age")));
    root.append(name, row.bars, facts);
    this.rows.set(request.sequence, row);
    return row;
  }

  fill(row, request, scale, begin, now) {
    row.root.dataset.state = request.state;
    row.root.classList.toggle("foreign", !request.own);
    row.id.textContent = request.own ? request.id : "another key";
    const cached = Math.min(request.cached ?? 0, request.prompt);
    const limit = request.prompt + (request.max_tokens ?? request.generated);
    const parts = [
      ["limit", 0, limit],
      ["cached", 0, cached],
      ["prompt", cached, request.prompt],
      ["generated", request.prompt, request.prompt + request.generated],
    ];
    place(row.tokens, parts, 0, scale);
    place(row.strip, spans(request, now).filter(([, , stop]) => stop > begin), begin, now - begin);
    row.state.textContent = this.stateText(request);
    row.count.textContent = `${request.prompt} + ${request.generated}${request.max_tokens ? ` / ${request.max_tokens}` : ""}`;
    row.age.textContent = seconds((request.ended_at ?? now) - request.accepted_at);
    row.root.setAttribute("aria-label", `Request ${request.sequence}, ${this.stateText(request)}, ${row.count.textContent} tokens; open its timeline`);
  }

  stateText(request) {
    if (request.state === "parked") return request.parked_for ? `parked: ${WHY[request.parked_for]}` : "parked";
    if (request.state === "ended") return request.finish ?? "ended";
    if (request.state === "running" && !request.first_token_at) return "prefill";
    return request.state;
  }

  move(event) {
    const row = event.target.closest(".row");
    const next = { ArrowDown: row?.nextElementSibling, ArrowUp: row?.previousElementSibling }[event.key];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  }

  open(row) {
    if (!row) return;
    this.chosen = Number(row.dataset.sequence);
    this.showTimeline();
    this.byId("timeline").showModal();
  }

  showTimeline() {
    const { now, requests } = this.snapshot;
    const request = requests.find((each) => each.sequence === this.chosen);
    if (!request) return;
    const begin = request.accepted_at;
    const end = request.ended_at ?? now;
    this.byId("timeline-title").textContent = `Request #${request.sequence}`;
    this.byId("timeline-state").textContent = this.stateText(request);
    this.byId("timeline-state").dataset.state = request.state;
    this.byId("timeline").style.setProperty("--own", colorOf(request.sequence));
    place(this.byId("timeline-line"), spans(request, now), begin, Math.max(0.001, end - begin));
    const happened = [["accepted", begin], ["started", request.started_at], ["first token", request.first_token_at]];
    for (const [start, stop] of request.pauses) happened.push(["parked", start], ["resumed", stop]);
    happened.push([`ended: ${request.finish ?? "ended"}`, request.ended_at]);
    const known = happened.filter(([, at]) => at !== null).sort((a, b) => a[1] - b[1]);
    this.byId("timeline-events").replaceChildren(
      ...known.map(([what, at]) => {
        const item = element("li", what === "parked" ? "parked" : "");
        item.append(element("b", "", what), element("span", "", `+ ${seconds(at - begin)}`));
        return item;
      }),
    );
    this.showFacts(request, now);
  }

  showFacts(request, now) {
    const parked = spans(request, now).filter(([kind]) => kind === "parked").reduce((sum, [, from, to]) => sum + to - from, 0);
    const facts = [
      ["id", request.own ? request.id : "another key's"],
      ["prompt tokens", request.prompt],
      ["of these cached", request.cached ?? "–"],
      ["generated", request.generated],
      ["limit", request.max_tokens ?? "–"],
      ["in cells now", request.computed ?? "–"],
      ["priority", request.priority ?? "–"],
      ["parked", `${request.pauses.length} times, ${seconds(parked)}`],
    ];
    this.byId("timeline-facts").replaceChildren(
      ...facts.flatMap(([name, value]) => [element("dt", "", name), element("dd", name === "id" ? "wide" : "", value)]),
    );
  }
}
