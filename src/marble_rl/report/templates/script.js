"use strict";

// Videos are their first frame, and play under the pointer or the focus; not for readers who want less motion.
const lessMotion = matchMedia("(prefers-reduced-motion: reduce)");
const playVideos = (holder, on) => {
  for (const image of holder.querySelectorAll("img[data-video]")) {
    image.dataset.still ||= image.src;
    if (on === "playing" in image.dataset) continue;
    image.src = on ? image.dataset.video : image.dataset.still;
    if (on) image.dataset.playing = "";
    else delete image.dataset.playing;
  }
};
for (const kind of ["mouseover", "mouseout", "focusin", "focusout"]) {
  document.addEventListener(kind, (event) => {
    const holder = event.target.closest?.("[data-plays]");
    if (holder) playVideos(holder, !lessMotion.matches && holder.matches(":hover, :focus-within"));
  });
}

(() => {
  const root = document.documentElement;
  root.classList.add("js");

  // What survives a reload of a watched page; a browser may refuse to keep anything for files.
  const keep = (key, value) => { try { sessionStorage.setItem("marble-" + key, value); } catch { /* not kept */ } };
  const kept = (key) => { try { return sessionStorage.getItem("marble-" + key); } catch { return null; } };

  // Theme: the system's, until the button says otherwise.
  if (kept("theme")) root.dataset.theme = kept("theme");
  document.querySelector(".theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const next = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    if (next === system) delete root.dataset.theme;
    else root.dataset.theme = next;
    keep("theme", root.dataset.theme || "");
  });

  // What the reader chose.
  for (const control of document.querySelectorAll("[data-keep]")) {
    const options = control.options && [...control.options].map((option) => option.value);
    const value = kept(control.id);
    if (value !== null && (!options || options.includes(value))) control.value = value;
    control.addEventListener("input", () => keep(control.id, control.value));
  }

  // Tabs, with the arrow keys.
  for (const list of document.querySelectorAll("[role=tablist]")) {
    const tabs = [...list.querySelectorAll("[role=tab]")];
    const select = (tab) => {
      for (const other of tabs) {
        other.setAttribute("aria-selected", String(other === tab));
        other.tabIndex = other === tab ? 0 : -1;
        document.getElementById(other.getAttribute("aria-controls")).classList.toggle("shown", other === tab);
      }
      keep("tab", tab.id);
    };
    for (const tab of tabs) {
      tab.addEventListener("click", () => select(tab));
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
        next.focus();
        select(next);
      });
    }
    select(tabs.find((tab) => tab.id === kept("tab")) || tabs.find((tab) => tab.getAttribute("aria-selected") === "true") || tabs[tabs.length - 1]);
  }

  // Values under the pointer, or under the arrow keys.
  const SVG = "http://www.w3.org/2000/svg";
  for (const values of document.querySelectorAll("figure.chart > script")) {
    const figure = values.parentElement;
    const svg = figure.querySelector("svg");
    const data = JSON.parse(values.textContent);
    const layer = svg.querySelector(".hover");
    const across = data.along === "x";
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.setAttribute("role", "status");
    let at = -1;
    const hide = () => { at = -1; layer.replaceChildren(); tip.remove(); };
    const show = (i) => {
      at = i;
      const [left, top, right, bottom] = data.plot;
      const place = data.at[i];
      const ends = across ? { x1: place, x2: place, y1: top, y2: bottom } : { x1: left, x2: right, y1: place, y2: place };
      const line = document.createElementNS(SVG, "line");
      for (const [name, value] of Object.entries(ends)) line.setAttribute(name, value);
      const heading = document.createElement("b");
      heading.textContent = data.x[i];
      const rows = [heading], marks = [line];
      for (const row of data.rows) {
        if (row.values[i] === null) continue;
        const entry = document.createElement("div");
        for (const text of [row.name, row.values[i]]) entry.append(Object.assign(document.createElement("span"), { textContent: text }));
        rows.push(entry);
        if (row.y.length) {
          const dot = document.createElementNS(SVG, "circle");
          for (const [name, value] of Object.entries({ cx: place, cy: row.y[i], r: 4, class: row.colour })) dot.setAttribute(name, value);
          marks.push(dot);
        }
      }
      layer.replaceChildren(...marks);
      tip.replaceChildren(...rows);
      figure.append(tip);
      const scale = svg.clientWidth / svg.viewBox.baseVal.width;
      const x = svg.getBoundingClientRect().left - figure.getBoundingClientRect().left + (across ? place : left) * scale;
      const room = figure.clientWidth - tip.offsetWidth - 6;
      tip.style.left = `${Math.max(6, Math.min(room, x > figure.clientWidth / 2 ? x - tip.offsetWidth - 12 : x + 12))}px`;
      const under = across ? 0 : (place + 12) * scale;
      tip.style.top = `${svg.getBoundingClientRect().top - figure.getBoundingClientRect().top + under}px`;
    };
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const pointed = (across ? event.clientX - box.left : event.clientY - box.top) * scale;
      let best = 0;
      data.at.forEach((place, i) => { if (Math.abs(place - pointed) < Math.abs(data.at[best] - pointed)) best = i; });
      show(best);
    };
    svg.addEventListener("pointermove", nearest);
    svg.addEventListener("pointerdown", nearest);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      show(Math.max(0, Math.min(data.at.length - 1, at < 0 ? 0 : at + step)));
    });
  }

  // A watched run: load again, and stay where the reader is.
  const seconds = Number(document.body.dataset.refresh);
  if (seconds) {
    const folds = [...document.querySelectorAll("details")];
    (kept("open") || "").split(",").filter(Boolean).forEach((i) => { if (folds[i]) folds[i].open = true; });
    addEventListener("DOMContentLoaded", () => {  // once the gallery is drawn
      if (kept("scroll")) scrollTo({ top: Number(kept("scroll")), behavior: "instant" });
    });
    const reload = () => {
      if (document.querySelector("dialog[open]")) return setTimeout(reload, 1000);  // not while a picture is looked at
      keep("scroll", scrollY);
      keep("open", folds.map((fold, i) => (fold.open ? i : "")).filter((i) => i !== "").join(","));
      location.reload();
    };
    setTimeout(reload, seconds * 1000);
  }
})();
