// The gallery of a run's page: pictures before and after, filtered, sorted, searched and enlarged.
(() => {
  const holder = document.getElementById("gallery-data");
  if (!holder) return;
  const { beside, rewards, cards } = JSON.parse(holder.textContent);
  const section = document.getElementById("gallery");
  const find = (selector) => section.querySelector(selector);
  const [search, source, order, reward, count] =
    ["search", "source", "order", "reward", "count"].map((name) => document.getElementById(`gallery-${name}`));
  const grid = find("#cards"), further = find(".further"), zoom = find("#zoom");
  const STEP = Number(count.defaultValue);

  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // Numbers as report/wording.py writes them.
  const number = (value, signed = false) => {
    const size = Math.abs(value);
    let text;
    if (size !== 0 && (size < 1e-4 || size >= 1e6)) text = size.toExponential(1);
    else if (size >= 100) text = size.toFixed(0);
    else text = size.toFixed(size > 0 && size < 1 ? Math.max(3, 1 - Math.floor(Math.log10(size))) : size < 10 ? 2 : 1);
    return Number(text) === 0 ? "0" : (value < 0 ? "−" : signed ? "+" : "") + text;
  };

  const deviations = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)} sd`;

  // Changes from the first to the last weights, of each reward and of all, in standard deviations.
  for (const card of cards) {
    const first = card.pictures[0].scores, last = card.pictures[card.pictures.length - 1].scores;
    const known = card.pictures.length > 1 ? rewards.filter((r) => r.name in first && r.name in last) : [];
    card.changes = Object.fromEntries(known.map((r) => [r.name, last[r.name] - first[r.name]]));
    card.parts = known.map((r) => ({ name: r.name, sd: r.unit > 0 ? card.changes[r.name] / r.unit : 0 }));
    card.mean = card.parts.reduce((sum, part) => sum + part.sd, 0) / (card.parts.length || 1);
    card.worst = card.parts.reduce((worst, part) => (worst && worst.sd <= part.sd ? worst : part), null);
    card.words = card.prompt.toLowerCase();
  }
  const verdict = (r, change) => (change >= r.least ? "up" : change <= -r.least ? "down" : "");
  const marked = (r, change) => ({ up: " ▲", down: " ▼", "": "" })[verdict(r, change)];
  const chosen = () => rewards.find((r) => `=${r.name}` === reward.value);

  let shown = [];
  const select = () => {
    const words = search.value.toLowerCase().trim(), r = chosen();
    shown = cards.filter((card) => card.words.includes(words) && (!source.value || source.value === `=${card.source}`));
    if (!order.value) return;
    const gain = order.value === "gain";
    const key = (card) => (r ? card.changes[r.name] : gain ? card.mean : card.worst?.sd);
    shown = shown.filter((card) => key(card) !== undefined).sort((a, b) => (gain ? key(b) - key(a) : key(a) - key(b)));
  };

  const figure = (picture, card) => {
    const { address, width, height, video } = picture.image;
    const image = make("img", { src: address, width, height, alt: `${picture.label}: ${card.prompt}`, loading: "lazy" });
    if (video) image.dataset.video = video;
    const notes = Object.entries(picture.notes).map(([name, note]) => make("p", { className: "note" }, `${name} ${note}`));
    const shot = video ? make("span", { className: "video" }, image) : image;
    return make("figure", {}, shot, make("figcaption", {}, picture.label), ...notes);
  };

  const summary = (card) => {
    const r = chosen();
    if (r && r.name in card.changes) {
      const [before, after] = [card.pictures[0], card.pictures[card.pictures.length - 1]].map((p) => number(p.scores[r.name]));
      const change = card.changes[r.name];
      return make("p", { className: `change ${verdict(r, change)}` },
        `${r.name} ${before} → ${after}, ${number(change, true)}${marked(r, change)}`);
    }
    if (r || !card.worst) return "";
    const worst = card.worst.sd < 0 ? `, worst: ${card.worst.name} ${deviations(card.worst.sd)}` : "";
    return make("p", { className: "change" }, `all rewards ${deviations(card.mean)}${worst}`);
  };

  const tile = (card, place) => {
    const prompt = make("h3", { className: "prompt", title: card.prompt }, make("bdi", {}, card.prompt));
    const shots = make("div", { className: "shots" }, ...card.pictures.map((picture) => figure(picture, card)));
    const article = make("article", { className: "card", tabIndex: 0 }, prompt, shots, summary(card));
    article.dataset.source = card.source;
    article.dataset.plays = "";
    article.setAttribute("role", "button");
    article.setAttribute("aria-haspopup", "dialog");
    article.addEventListener("click", () => open(place));
    return article;
  };

  const draw = () => {
    select();
    const most = Math.max(STEP, Number(count.value));
    grid.replaceChildren(...shown.slice(0, most).map(tile));
    further.hidden = shown.length <= most;
    further.textContent = `Show ${Math.min(STEP, shown.length - most)} more`;
    find(".tools output").textContent = `${shown.length} of ${cards.length} prompt${cards.length === 1 ? "" : "s"}`;
  };
  for (const control of [search, source, order, reward]) {
    control.addEventListener("input", () => { setCount(STEP); draw(); });
  }
  const setCount = (value) => { count.value = value; count.dispatchEvent(new Event("input")); };
  further.addEventListener("click", () => {
    const place = grid.children.length;
    setCount(place + STEP);
    draw();
    grid.children[place].focus({ preventScroll: true });
  });

  // One card, as large as the window allows.
  let at = 0;
  const player = zoom.querySelector("[data-player]");
  const playAll = (on) => {
    playVideos(zoom, on);
    player.hidden = !zoom.querySelector("[data-video]");
    player.textContent = on ? "Pause" : "Play";
  };
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell, i) =>
    cell instanceof Node ? cell : make(tag, { className: i ? "n" : "" }, cell)));
  const fill = () => {
    const card = shown[at], compared = card.pictures.length > 1;
    find("#zoom .bar output").textContent = `${at + 1} of ${shown.length} · ${card.source}`;
    find("#zoom-prompt").textContent = card.prompt;
    find("#zoom .shots").replaceChildren(...card.pictures.map((picture) => {
      const large = figure(picture, card);
      const { file } = picture.image;
      large.append(make("a", { className: "file", href: `${beside}/${encodeURIComponent(file)}`, target: "_blank" }, file));
      return large;
    }));
    playAll(!lessMotion.matches);
    const scored = rewards.filter((r) => card.pictures.some((picture) => r.name in picture.scores));
    const head = ["reward", ...card.pictures.map((picture) => picture.label), ...(compared ? ["change"] : [])];
    find("#zoom thead").replaceChildren(row(head, "th"));
    find("#zoom tbody").replaceChildren(...scored.map((r) => {
      const name = make("th", { scope: "row" }, make("i", { className: `swatch ${r.colour}` }), r.name);
      const means = card.pictures.map((picture) => (r.name in picture.scores ? number(picture.scores[r.name]) : ""));
      if (!compared) return row([name, ...means], "td");
      const change = card.changes[r.name];
      const text = change === undefined ? "" : `${number(change, true)}${marked(r, change)}`;
      return row([name, ...means, make("td", { className: `n ${change === undefined ? "" : verdict(r, change)}` }, text)], "td");
    }));
    for (const button of zoom.querySelectorAll("[data-step]")) button.disabled = !(at + Number(button.dataset.step) in shown);
  };
  const walk = (step) => {
    if (!(at + step in shown)) return;
    at += step;
    fill();
  };
  const open = (place) => {
    at = place;
    fill();
    zoom.showModal();
    zoom.scrollTop = 0;
  };
  zoom.addEventListener("close", () => {
    if (at >= grid.children.length) { setCount(at + 1); draw(); }
    grid.children[at].focus();
  });
  zoom.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.dataset.step) walk(Number(button.dataset.step));
    else if (button === player) playAll(player.textContent === "Play");
    else if (button || event.target === zoom) zoom.close();
  });
  zoom.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    walk(step);
  });

  grid.addEventListener("keydown", (event) => {
    const place = [...grid.children].indexOf(document.activeElement);
    if (place < 0) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      open(place);
      return;
    }
    const across = getComputedStyle(grid).gridTemplateColumns.split(" ").length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
    if (!step) return;
    event.preventDefault();
    grid.children[place + step]?.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || zoom.open) return;
    if (event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    search.focus();
    search.select();
    find(".tools").scrollIntoView({ block: "start" });
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      search.value = "";
      search.dispatchEvent(new Event("input"));
      search.blur();
    }
    if (event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      grid.firstElementChild?.focus();
    }
  });

  draw();
})();
