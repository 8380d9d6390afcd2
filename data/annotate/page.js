'use strict';
// All text that comes from the benchmark or from people is set with textContent; nothing here builds HTML from strings.
const $ = id => document.getElementById(id);
const make = (tag, text, ...classes) => { const e = document.createElement(tag); e.textContent = text ?? ''; e.classList.add(...classes); return e; };
const ASKED = [...document.querySelectorAll('fieldset[data-name]')].map(f => f.dataset), QUESTIONS = ASKED.map(q => q.name);
const SEVERE = [...ASKED].sort((a, b) => a.severity - b.severity);   // most severe first
const LATE = 120;         // seconds
const AGAIN = 1500;       // milliseconds between attempts to save
let state, at = -1, item, also, shown = 0, busy = false, drafts = new Map();

async function ask(path, body) {
  const post = body && {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body)};
  const reply = await fetch(path, post || {});
  const told = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(told.error), {status: reply.status});
  return told;
}
// What is asked again until it is answered: the server may be stopped for a while. Only its own refusal of what was sent ends it.
async function insist(path, body, what) {
  for (;;) {
    try { const told = await ask(path, body); alarm(''); return told; }
    catch (error) {
      if (error.status && error.status < 500) throw error;
      alarm(`${what} The server ${error.status ? `answers: ${error.message}` : 'does not answer'}. Keep this page open: it tries again by itself.`);
      await new Promise(done => setTimeout(done, AGAIN));
    }
  }
}
function alarm(text) { $('alarm').textContent = text; $('alarm').hidden = !text; }
function status(text, saved = false) { $('status').textContent = text; $('status').classList.toggle('saved', saved); }

// ---- what is shown
function frame(image, name, tag = 'button') {
  const f = make(tag, '', 'frame'), img = make('img');
  if (tag === 'button') f.type = 'button';
  img.alt = name; img.src = `image/${image}`;
  img.onerror = () => img.replaceWith(make('span', `${name}: this image cannot be read`, 'broken'));
  f.append(img);
  return f;
}
const others = () => [...item.negatives, ...item.others];
const pictures = () => [{image: item.target, name: 'Target'}, ...others().map((c, n) => ({image: c.image, name: n < item.negatives.length ? `Hard negative ${n + 1}` : `Ranked image ${n + 1}`}))];

function progress() {
  const done = state.done.filter(Boolean).length, all = state.items.length;
  $('progress').max = all || 1; $('progress').value = done;
  $('count').textContent = `${done} of ${all} ${state.adjudicates ? 'disagreements settled' : 'judged'}`;
  $('undo').disabled = state.last === null;
  $('open').disabled = !state.done.includes(false);
  $('back').disabled = at < 0 ? !all : at === 0; $('on').disabled = at < 0 || at === all - 1;   // behind the last item, only back
}
function images() {
  $('reference').hidden = !item.reference.length;
  $('reference').lastElementChild.replaceChildren(...item.reference.map(n => enlarging(frame(n, 'reference'), 0)));
  $('target').lastElementChild.replaceChildren(enlarging(frame(item.target, 'target'), 0));
  const columns = others().length > 4 ? 3 : 2;
  $('rows').style.setProperty('--columns', columns);
  let key = 0;
  for (const [id, some] of [['negatives', item.negatives], ['others', item.others]]) {
    $(id).hidden = !some.length;
    $(id).style.flex = `${Math.ceil(some.length/columns)} 1 0`;
    $(id).lastElementChild.replaceChildren(...some.map(c => markable(c, ++key)));
  }
}
function enlarging(f, n) { f.title = 'large (z)'; f.onclick = () => enlarge(n); return f; }
function markable(c, n) {
  const f = frame(c.image, `image ${n}`);
  f.dataset.id = c.id; f.setAttribute('aria-pressed', 'false');
  if (n <= 9) f.append(make('kbd', n));
  f.append(make('span', '✓ also right', 'tick'));
  f.onclick = event => { mark(c.id); unfocus(event); };
  return f;
}
function votes() {
  $('votes').hidden = !item.votes.length;
  if (!item.votes.length) return;
  const said = v => [...QUESTIONS.map(q => v.answer[q]), JSON.stringify(v.answer.also)];
  const differs = n => new Set(item.votes.map(v => n < QUESTIONS.length ? v.answer[QUESTIONS[n]] === 'ok' : said(v)[n])).size > 1;
  $('votes').replaceChildren(make('h2', 'They said'), ...item.votes.map(v => {
    const e = make('div', '', 'vote'), list = make('ul'), take = make('button', 'take this');
    QUESTIONS.forEach((q, n) => { if (differs(n) || v.answer[q] !== 'ok') list.append(make('li', `${q}: ${v.answer[q]}`, ...(differs(n) ? ['differs'] : []))); });
    const marked = others().flatMap((c, n) => v.answer.also.includes(c.id) ? [n + 1] : []);
    list.append(make('li', `right as well: ${marked.join(', ') || 'none'}`, ...(differs(QUESTIONS.length) ? ['differs'] : [])));
    if (v.answer.note) { const note = make('li', ''); note.append('note: ', make('bdi', v.answer.note)); list.append(note); }
    take.type = 'button'; take.onclick = event => { fill(v.answer); unfocus(event); };
    e.append(make('b', v.name), take, list);
    return e;
  }));
}
async function show(n) {
  if (item && at >= 0) keep();
  const told = await insist(`item/${state.items[n]}`, null, 'The item could not be loaded.');
  at = n; item = told; shown = performance.now();
  $('main').hidden = false; $('done').hidden = true;
  $('text').textContent = item.text;
  images(); votes(); fill(drafts.get(item.item) || item.answer); progress();
  $('form').scrollTop = $('text').scrollTop = 0;
  if (document.activeElement !== document.body) document.activeElement.blur();
  document.body.dataset.item = item.item;
  ahead(n);
}
function ahead(n) {   // the next open item's images are fetched while this one is judged
  const next = state.done.findIndex((d, m) => !d && m > n);
  if (next >= 0) ask(`item/${state.items[next]}`).then(i => { for (const x of [...i.reference, i.target, ...[...i.negatives, ...i.others].map(c => c.image)]) new Image().src = `image/${x}`; }, () => {});
}
function finish() {
  at = -1; item = null; delete document.body.dataset.item;
  const all = state.items.length;
  $('main').hidden = true; $('done').hidden = false;
  $('done').firstElementChild.textContent = state.adjudicates ? (all ? 'Everything is settled' : 'Nobody disagrees so far') : 'All judged. Thank you!';
  $('done').lastElementChild.textContent = state.adjudicates ? 'Load the page again when more has been judged.' : 'Every judgement is saved. Undo takes the last one back.';
  progress();
}
function forward() {
  const later = state.done.findIndex((d, n) => !d && n > at), any = state.done.indexOf(false);
  return later >= 0 ? show(later) : any >= 0 ? show(any) : finish();
}

// ---- the answer
const value = q => $('form').elements[q].value || null;
const answer = () => ({...Object.fromEntries(QUESTIONS.map(q => [q, value(q)])), also, note: $('note').value});
function fill(told) {
  for (const q of QUESTIONS) for (const r of $('form').elements[q]) r.checked = told ? r.value === told[q] : false;
  also = told ? told.also && [...told.also] : null;
  $('note').value = told ? told.note : '';
  touched();
}
function keep() { if (JSON.stringify(answer()) !== JSON.stringify(item.answer)) drafts.set(item.item, answer()); }
function mark(id) { if (busy || !item) return; also = also || []; also = also.includes(id) ? also.filter(c => c !== id) : [...also, id]; if (!also.length) also = null; touched(); }
function none() { if (busy || !item) return; also = []; touched(); }
function turn(q) {
  const options = [...$('form').elements[q]], n = options.findIndex(r => r.checked);
  options[(n + 1) % options.length].checked = true;
  touched();
}
function missing() {
  const open = QUESTIONS.filter(q => !value(q));
  if (!also && others().length) open.push('also');
  if (QUESTIONS.some(q => value(q) === 'other') && !$('note').value.trim()) open.push('note');
  return open;
}
const box = name => name === 'also' ? $('also') : name === 'note' ? $('noted') : document.querySelector(`input[name=${name}]`).closest('fieldset');
function touched() {
  document.querySelectorAll('.missing').forEach(e => e.classList.remove('missing'));
  document.querySelectorAll('.strip .frame').forEach(f => f.setAttribute('aria-pressed', String(!!also && also.includes(f.dataset.id))));
  $('none').setAttribute('aria-pressed', String(!!also && !also.length));
  $('also').hidden = !others().length;
  const marked = others().flatMap((c, n) => also && also.includes(c.id) ? [n + 1] : []);
  $('marked').textContent = marked.length ? `right as well: ${marked.join(', ')}` : '';
  const flags = SEVERE.filter(q => value(q.name) && value(q.name) !== 'ok').map(q => q.flag), open = QUESTIONS.filter(q => !value(q));
  $('verdict').replaceChildren(...(flags.length ? ['So the query is ', make('b', flags[0]), flags.length > 1 ? ` (and ${flags.slice(1).join(', ')})` : ''] : open.length ? [`${open.length} of ${QUESTIONS.length} questions open`] : ['So the query is ', make('b', 'VALIDATED')]));
}
async function save() {
  if (busy || !item) return;
  const open = missing();
  if (open.length) {
    open.forEach(name => box(name).classList.add('missing'));
    status(open[0] === 'note' ? '“Other” needs a note.' : open[0] === 'also' ? 'Say which other images are right as well, or 0 for none.' : 'Answer the marked questions first.');
    box(open[0]).scrollIntoView({block: 'nearest'});
    return;
  }
  const number = item.item;
  const request = {item: number, answer: {...answer(), also: also || []}, key: crypto.randomUUID(), seconds: Math.round((performance.now() - shown)/100)/10};
  await working('Saving…', async () => {
    const told = await insist('save', request, 'NOT SAVED YET.');
    take(told); drafts.delete(number); item = null;
    status(`Saved: judgement ${told.row}`, true);
    await forward();
  });
}
async function undo() {
  if (busy || state.last === null) return;
  await working('Taking back…', async () => {
    const told = await insist('undo', {row: state.last}, 'Not taken back yet.');
    if (item) keep();
    const was = told.item;
    take(told); item = null; drafts.delete(was);
    const n = state.items.indexOf(was);
    status('Taken back; not saved now');
    await (n >= 0 ? show(n) : forward());
  });
}
function take(told) { state.items = told.items; state.done = told.done; state.last = told.last; at = item ? state.items.indexOf(item.item) : at; }
async function working(text, act) {
  busy = true; status(text); $('form').classList.add('busy'); $('form').inert = true;
  try { await act(); }
  catch (error) { status(''); alarm(error.status === 403 ? 'This address is not valid any more. Ask for a new one.' : `Not done: ${error.message}`); }
  finally { busy = false; $('form').classList.remove('busy'); $('form').inert = false; }
}
const go = step => { const n = (at < 0 ? state.items.length : at) + step; if (!busy && n >= 0 && n < state.items.length) working('', () => show(n)); };
const onward = () => { if (!busy && state.done.includes(false)) working('', forward); };

// ---- large images
let big = 0;
function enlarge(n) {
  const all = pictures();
  big = (n + all.length) % all.length;
  $('large-a').parentElement.hidden = !item.reference.length;
  if (item.reference.length) $('large-a').src = `image/${item.reference[0]}`;
  $('large-b').src = `image/${all[big].image}`; $('large-b').alt = $('large-name').textContent = all[big].name;
  $('large-text').textContent = item.text;
  if (!$('large').open) $('large').showModal();
}

// ---- keys
const unfocus = event => { if (event.detail) event.currentTarget.blur(); };   // after a click of the mouse, Enter saves again
const KEYS = {...Object.fromEntries(ASKED.map(q => [q.key, () => turn(q.name)])), 0: none, v: fine, n: () => { $('note').focus(); $('note').scrollIntoView({block: 'nearest'}); },
  z: () => enlarge(0), Enter: save};
const ALWAYS = {u: undo, ArrowLeft: () => go(-1), ArrowRight: () => go(1), o: onward, '?': () => $('rules').showModal()};
function fine() { for (const q of QUESTIONS) if (!value(q)) [...$('form').elements[q]][0].checked = true; touched(); }
document.addEventListener('keydown', event => {
  const inside = event.target, key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if ($('rules').open) return;
  if ($('large').open) {
    if (key === 'z') $('large').close(); else if (key === 'ArrowRight') enlarge(big + 1); else if (key === 'ArrowLeft') enlarge(big - 1); else return;
    return event.preventDefault();
  }
  if (inside.tagName === 'TEXTAREA') {
    if (key === 'Escape') inside.blur();
    if (key === 'Enter' && (event.ctrlKey || event.metaKey)) { event.preventDefault(); inside.blur(); save(); }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || busy || !state) return;
  if (inside.tagName === 'BUTTON' && (key === 'Enter' || key === ' ')) return;
  if (inside.type === 'radio' && key.startsWith('Arrow')) return;
  const act = ALWAYS[key] || (item && (KEYS[key] || (/^[1-9]$/.test(key) && others()[key - 1] && (() => mark(others()[key - 1].id)))));
  if (act) { event.preventDefault(); act(); }
});
for (const [id, act] of Object.entries({back: () => go(-1), on: () => go(1), open: onward, undo, help: ALWAYS['?'], none, fine, save})) $(id).onclick = event => { unfocus(event); act(); };
$('form').onsubmit = event => event.preventDefault();
$('form').addEventListener('input', touched);
addEventListener('beforeunload', event => { if (busy && !$('alarm').hidden) event.preventDefault(); });
setInterval(() => { $('late').hidden = !item || performance.now() - shown < LATE*1000; }, 1000);

working('Loading…', async () => {
  state = await insist('state', null, 'The study could not be loaded.');
  document.title = `${state.name} · ${state.benchmark}`;
  $('benchmark').textContent = state.benchmark; $('who').textContent = state.name; $('model').textContent = state.model;
  status('');
  await forward();
  performance.mark('ready');
});
