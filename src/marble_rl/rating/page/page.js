// The page of a rater. An answer is kept in the browser until the server has said that it is on its disk.
"use strict";

const RETRY_FIRST = 1000, RETRY_MOST = 15000, REQUEST_MOST = 15000; // milliseconds
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const ASKED = {
  scales: [
    { ask: "How well does the picture match the text?", ends: ["not at all", "fully"] },
    { ask: "How good does the picture look?", ends: ["bad", "excellent"] },
  ],
  pairs: [{ ask: "Which picture matches the text better?" }, { ask: "Which picture looks better?" }],
};
const HOW = {
  scales: "Read the text, then give each picture two numbers from 1 to 5: how well it matches the text, however it looks; "
    + "and how good it looks, whatever the text says.",
  pairs: "Read the text, then say which of the two pictures matches it better, however it looks; and which looks better, "
    + "whatever the text says. If you see no difference, choose “same”.",
};
const CHOICES = { scales: ["1", "2", "3", "4", "5"], pairs: ["A", "same", "B"] };

const $ = id => document.getElementById(id);
const KEPT = `marble rate ${location.pathname}`;
let study; // {ask, media, rater, questions: [{id, prompt, pictures, rows}]}
let place = 0; // index of the question shown; after the last: the end
let marked = 0; // row that the digit keys answer
let waiting = []; // answers that are not confirmed, oldest first
let sending = false;
let hurry = () => {}; // ends the pause before the next attempt
const loaded = new Map(); // pictures of this question and its neighbours, by identifier

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Texts speak of pictures; some studies are of videos.
const named = text => study.media === "video" ? text.replaceAll("picture", "video").replaceAll("Picture", "Video") : text;

// ---- answers

function keep() {
  try { localStorage.setItem(KEPT, JSON.stringify(waiting)); } catch { /* private mode: this page keeps them */ }
}

function keptBefore() {
  try { return JSON.parse(localStorage.getItem(KEPT)) ?? []; } catch { return []; }
}

function answer(row, choice) {
  const question = study.questions[place];
  question.rows[row] = choice;
  const same = ({ question: id, row: other }) => id === question.id && other === row;
  waiting = waiting.filter((given, i) => (sending && i === 0) || !same(given)); // the first may be under way
  waiting.push({ question: question.id, row, choice });
  keep();
  deliver();
}

// Sends one answer at a time, in order, until none is left: the last one to a row must arrive last.
async function deliver() {
  if (sending) return;
  sending = true;
  let pause = RETRY_FIRST;
  while (waiting.length) {
    if (pause === RETRY_FIRST) $("saved").textContent = "Saving …";
    const reason = await refused(waiting[0]);
    if (reason === null) {
      waiting.shift();
      keep();
      pause = RETRY_FIRST;
      $("trouble").hidden = true;
    } else {
      const count = waiting.length === 1 ? "1 answer is" : `${waiting.length} answers are`;
      $("saved").textContent = "Not saved";
      $("reason").textContent = `${count} not saved yet: ${reason}. This page keeps trying; leave it open.`;
      $("trouble").hidden = false;
      await new Promise(go => { hurry = go; setTimeout(go, pause); });
      pause = Math.min(2 * pause, RETRY_MOST);
    }
  }
  sending = false;
  $("saved").textContent = "Saved";
  if (place === study.questions.length) showEnd();
}

// Why the server did not take an answer; null if it did.
async function refused(given) {
  try {
    const body = JSON.stringify(given);
    const response = await fetch("answers", { method: "POST", body, signal: AbortSignal.timeout(REQUEST_MOST) });
    if (response.ok) return null;
    return (await response.json()).error;
  } catch {
    return "the server does not answer";
  }
}

// ---- what is shown

const isDone = question => question.rows.every(choice => choice !== null);

function showCount() {
  const total = study.questions.length, done = study.questions.filter(isDone).length;
  $("count").textContent = `${done} of ${total} done`;
  $("progress").max = total;
  $("progress").value = done;
  $("next").classList.toggle("ready", place < total && isDone(study.questions[place]));
  $("next").disabled = place === total;
  $("back").disabled = place === 0;
}

function picture(id) {
  if (!loaded.has(id)) {
    const image = new Image();
    let attempt = 0;
    image.addEventListener("error", () => setTimeout(() => { image.src = `pictures/${id}?${attempt++}`; }, 2000));
    image.src = `pictures/${id}`;
    loaded.set(id, image);
  }
  return loaded.get(id);
}

function rowElement(row, criterion, caption) {
  const { ask: text, ends } = ASKED[study.ask][criterion];
  const ask = named(text);
  const question = study.questions[place];
  const choices = make("div", { className: "choices", role: "radiogroup", ariaLabel: `${caption}${ask}` });
  CHOICES[study.ask].forEach((label, i) => {
    const end = ends && i === 0 ? `, ${ends[0]}` : ends && i === 4 ? `, ${ends[1]}` : "";
    const button = make("button", { type: "button", role: "radio", textContent: label, ariaLabel: `${label}${end}` });
    button.ariaChecked = question.rows[row] === i + 1;
    button.addEventListener("click", () => choose(row, i + 1));
    choices.append(button);
  });
  const element = make("div", { className: "row" }, make("span", { className: "ask", textContent: ask }), choices);
  if (ends) element.append(make("div", { className: "ends", ariaHidden: "true" }, ...ends.map(e => make("span", { textContent: e }))));
  return element;
}

function show(index) {
  place = Math.max(0, Math.min(index, study.questions.length));
  $("question").hidden = place === study.questions.length;
  $("end").hidden = place < study.questions.length;
  if (place === study.questions.length) return showEnd();
  const question = study.questions[place];
  const near = study.questions.slice(Math.max(0, place - 1), place + 2).flatMap(each => each.pictures);
  for (const id of loaded.keys()) if (!near.includes(id)) loaded.delete(id);
  near.forEach(picture);
  $("place").textContent = `Question ${place + 1} of ${study.questions.length}. The text:`;
  $("prompt").textContent = question.prompt;
  const criteria = ASKED[study.ask].length;
  const figures = question.pictures.map((id, i) => {
    const name = named(`Picture ${LETTERS[i] ?? i + 1}`);
    const image = picture(id);
    image.alt = name;
    const frame = make("button", { type: "button", className: "frame", ariaLabel: `Enlarge ${name}` }, image);
    frame.addEventListener("click", () => enlarge(image));
    const figure = make("figure", {}, frame, make("figcaption", { textContent: name }));
    if (study.ask === "scales") for (let c = 0; c < criteria; c++) figure.append(rowElement(i * criteria + c, c, `${name}. `));
    return figure;
  });
  $("pictures").replaceChildren(...figures);
  $("rows").replaceChildren(...(study.ask === "pairs" ? ASKED.pairs.map((_, c) => rowElement(c, c, "")) : []));
  allowWhenSeen(question);
  mark(Math.max(0, question.rows.indexOf(null)), false);
  showCount();
  scrollTo(0, 0);
  $("prompt").focus({ preventScroll: true });
}

// A picture that has not come yet cannot be rated.
function allowWhenSeen(question) {
  const seen = question.pictures.map(id => picture(id).complete && picture(id).naturalWidth > 0);
  const rows = [...document.querySelectorAll(".row")];
  rows.forEach((row, i) => {
    const allowed = study.ask === "pairs" ? seen.every(Boolean) : seen[Math.floor(i / ASKED.scales.length)];
    row.querySelectorAll("button").forEach(button => { button.disabled = !allowed; });
  });
  question.pictures.filter((_, i) => !seen[i]).forEach(id => {
    picture(id).addEventListener("load", () => { if (study.questions[place] === question) allowWhenSeen(question); }, { once: true });
  });
}

function mark(row, scroll = true) {
  marked = row;
  document.querySelectorAll(".row").forEach((element, i) => element.classList.toggle("marked", i === row));
  if (scroll) document.querySelectorAll(".row")[row]?.scrollIntoView({ block: "nearest" });
}

function choose(row, choice) {
  const buttons = document.querySelectorAll(".row")[row].querySelectorAll("button");
  if (buttons[choice - 1] === undefined || buttons[0].disabled) return;
  answer(row, choice);
  buttons.forEach((button, i) => { button.ariaChecked = i === choice - 1; });
  const open = study.questions[place].rows.indexOf(null, row);
  mark(open === -1 ? row : open, open !== -1);
  showCount();
}

function showEnd() {
  const open = study.questions.filter(question => !isDone(question)).length;
  const all = `All ${study.questions.length} questions are answered`;
  $("thanks").textContent = open ? (open === 1 ? "One question is still open" : `${open} questions are still open`) : "Thank you!";
  $("rest").textContent = open ? "" : waiting.length
    ? `${all}, but not all answers are saved yet. Please leave this page open.`
    : `${all} and saved. You can close this page, or go back and change answers.`;
  $("unanswered").hidden = open === 0;
  showCount();
  $("thanks").focus({ preventScroll: true });
}

function enlarge(image) {
  $("large").replaceChildren(make("img", { src: image.src, alt: image.alt }));
  $("large").showModal();
}

// ---- keys and buttons

document.addEventListener("keydown", event => {
  if (!study || event.ctrlKey || event.metaKey || event.altKey || $("large").open) return;
  const atEnd = place === study.questions.length;
  const rows = document.querySelectorAll(".row").length;
  if (event.key === "ArrowLeft") show(place - 1);
  else if (event.key === "ArrowRight") show(place + 1);
  else if (event.key === "ArrowUp" && !atEnd) mark((marked + rows - 1) % rows);
  else if (event.key === "ArrowDown" && !atEnd) mark((marked + 1) % rows);
  else if (/^[1-9]$/.test(event.key) && !atEnd) choose(marked, Number(event.key));
  else return;
  event.preventDefault();
});
$("back").addEventListener("click", () => show(place - 1));
$("next").addEventListener("click", () => show(place + 1));
$("unanswered").addEventListener("click", () => show(study.questions.findIndex(question => !isDone(question))));
$("retry").addEventListener("click", () => hurry());
$("large").addEventListener("click", () => $("large").close());
addEventListener("online", () => hurry());
addEventListener("beforeunload", event => { if (waiting.length) event.preventDefault(); });

async function begin() {
  let given;
  while (given === undefined) {
    try {
      const response = await fetch("questions", { signal: AbortSignal.timeout(REQUEST_MOST) });
      if (response.ok) given = await response.json();
      else throw new Error((await response.json()).error);
    } catch (error) {
      $("reason").textContent = `The questions cannot be loaded (${error.message}). This page keeps trying.`;
      $("trouble").hidden = false;
      await new Promise(go => { hurry = go; setTimeout(go, 2000); });
    }
  }
  $("trouble").hidden = true;
  study = given;
  waiting = keptBefore();
  for (const { question: id, row, choice } of waiting) {
    const question = study.questions.find(each => each.id === id);
    if (question) question.rows[row] = choice;
  }
  document.body.classList.add(study.ask);
  $("how").textContent = `You rate as ${study.rater}. ${named(HOW[study.ask])}`;
  for (const element of document.querySelectorAll("[data-named]")) element.textContent = named(element.textContent);
  $("most").textContent = CHOICES[study.ask].length;
  const open = study.questions.findIndex(question => !isDone(question));
  show(open === -1 ? study.questions.length : open);
  if (waiting.length) deliver();
}

begin();
