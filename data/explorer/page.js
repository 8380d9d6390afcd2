// The page of `cirkit explore`. All text enters by textContent; nothing is fetched.
(() => {
'use strict';

const byId = id => document.getElementById(id);
const taken = id => { const node = byId(id), value = JSON.parse(node.textContent); node.remove(); return value; };
const data = taken('data'), Q = data.queries, N = Q.id.length;
const OUTCOMES = [['all', 'all'], ['hit', 'hit'], ['miss', 'miss'], ['only', 'only this model'], ['none', 'no model']];
const SORTS = [['id', 'as in the benchmark'], ['best', 'rank, best first'], ['worst', 'rank, worst first']];
const NARROW = 860;   // as in page.css
const bar = byId('bar'), list = byId('list'), dialog = byId('one');

function make(tag, cls, ...children) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  node.append(...children);
  return node;
}

function foreign(tag, cls, text) {   // text of the data: its direction is its own
  const node = make(tag, cls, text);
  node.dir = 'auto';
  return node;
}

// ---- data

const tables = new Map(data.tables.map((t, n) => [`${t.model} ${t.modality}`, Object.assign(t, {n})]));
const table = (model, modality) => tables.get(`${model} ${modality}`);
const place = new Map(Q.id.map((id, i) => [id, i]));
const words = Q.id.map((id, i) => `${Q.text[i]}\n${id}`.toLowerCase());

function top(t, i) {   // the candidates that a model put first; parsed when first asked for
  t.top ??= taken(`top-${t.n}`);
  return t.top.slice(i * data.top, (i + 1) * data.top).filter(c => c >= 0);
}

const chunks = [];
function source(picture) {
  const p = data.pictures;
  if (p.folder) return `${p.folder}/${[picture / 1000, picture % 1000].map(n => String(Math.floor(n)).padStart(3, '0')).join('/')}.jpg`;
  const chunk = Math.floor(picture / p.chunk);
  chunks[chunk] ??= taken(`pictures-${chunk}`);
  return `data:image/jpeg;base64,${p.head}${chunks[chunk][picture % p.chunk]}`;
}

// ---- state: what the address holds

const DEFAULTS = {model: data.models[0].name, modality: data.modalities[0], k: data.ks.includes(10) ? 10 : data.ks.at(-1),
                  show: 'all', cat: '', sub: '', label: '', sort: 'id', find: '', q: ''};
let state = {...DEFAULTS}, shown = [], current = -1;

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), next = {...DEFAULTS};
  for (const key of Object.keys(DEFAULTS)) if (given.has(key)) next[key] = key === 'k' ? Number(given.get(key)) : given.get(key);
  for (const key of ['model', 'modality', 'k', 'show', 'sort', 'cat', 'sub', 'label'])
    if (next[key] !== '' && !choices(key, next).some(([value]) => String(value) === String(next[key]))) next[key] = DEFAULTS[key];
  if (!table(next.model, next.modality)) next.modality = data.tables.find(t => t.model === next.model).modality;
  state = next;
}

function address(changes = {}) {
  const all = {...state, ...changes}, params = new URLSearchParams();
  for (const key of Object.keys(DEFAULTS)) if (all[key] !== DEFAULTS[key]) params.set(key, all[key]);
  return '#' + params;
}

function writeAddress() {
  try { history.replaceState(null, '', address()); } catch { /* a frame without an address of its own */ }
}

function choices(key, at = state) {
  switch (key) {
    case 'model': return data.models.map(m => [m.name, m.family ? `${m.name} (${m.family})` : m.name]);
    case 'modality': return data.modalities.filter(o => table(at.model, o)).map(o => [o, data.words[o] || o]);
    case 'k': return data.ks.map(k => [k, k]);
    case 'show': return OUTCOMES;
    case 'sort': return SORTS;
    case 'cat': return data.categories.map(c => [c, c]);
    case 'sub': return data.subcategories.filter(s => !at.cat || s.category === at.cat).map(s => [s.name, s.title]);
    case 'label': return data.audit ? data.audit.labels.map(l => [l.name, l.title]) : [];
  }
}

// ---- filters

function chosen() {
  const t = table(state.model, state.modality), k = state.k, kept = [];
  const others = data.tables.filter(o => o.modality === state.modality && o !== t);
  const cat = data.categories.indexOf(state.cat), sub = data.subcategories.findIndex(s => s.name === state.sub);
  const label = state.label && data.audit.labels.find(l => l.name === state.label).codes;
  const codes = data.audit && data.audit.codes[data.ks.indexOf(k)];
  const find = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  for (let i = 0; i < N; i++) {
    const hit = t.rank[i] <= k;
    if (cat >= 0 && Q.cat[i] !== cat || sub >= 0 && Q.sub[i] !== sub) continue;
    if (label && !label.includes(codes[i])) continue;
    if ((state.show === 'hit' || state.show === 'only') && !hit || (state.show === 'miss' || state.show === 'none') && hit) continue;
    if ((state.show === 'only' || state.show === 'none') && others.some(o => o.rank[i] <= k)) continue;
    if (find.length && !find.every(word => words[i].includes(word))) continue;
    kept.push(i);
  }
  if (state.sort !== 'id') {
    const way = state.sort === 'best' ? 1 : -1;
    kept.sort((a, b) => way * (t.rank[a] - t.rank[b]) || a - b);
  }
  return kept;
}

const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : '–';
const hits = (t, some, k) => { let n = 0; for (const i of some) n += t.rank[i] <= k; return n; };
const number = n => n.toLocaleString('en');

function fill(select, options, value, all) {
  const wanted = all === undefined ? options : [['', all], ...options], said = JSON.stringify(wanted);
  if (select.said !== said) select.replaceChildren(...wanted.map(([v, text]) => { const o = make('option', '', String(text)); o.value = v; return o; }));
  select.said = said;
  select.value = value;
}

function showControls() {
  for (const key of ['model', 'modality', 'k', 'sort']) fill(byId(key), choices(key), state[key]);
  for (const key of ['cat', 'sub', 'label']) {
    fill(byId(key), choices(key), state[key], 'all');
    byId(key).closest('label').hidden = !choices(key).length;
  }
  for (const input of bar.elements.show) input.checked = input.value === state.show;
  if (byId('find').value !== state.find) byId('find').value = state.find;
}

function showStatus() {
  const t = table(state.model, state.modality), n = hits(t, shown, state.k);
  byId('status').textContent = `${number(shown.length)} of ${number(N)} queries; ${state.model} finds ${percent(n, shown.length)} of them in the top ${state.k} (${number(n)}).`;
  byId('none').hidden = shown.length > 0;
}

function showModels() {
  const head = make('tr', '', make('th', '', `Hit at ${state.k}`), ...data.modalities.map(o => make('th', '', data.words[o] || o)));
  const rows = data.models.map(m => make('tr', '', foreign('th', '', m.name), ...data.modalities.map(o => {
    const t = table(m.name, o);
    if (!t) return make('td', '', '–');
    const button = make('button', '', percent(hits(t, shown, state.k), shown.length));
    button.type = 'button';
    button.setAttribute('aria-pressed', m.name === state.model && o === state.modality);
    button.setAttribute('aria-label', `${m.name}, ${data.words[o] || o}: ${button.textContent}; look at its results`);
    button.addEventListener('click', () => update({model: m.name, modality: o}));
    return make('td', '', button);
  })));
  document.querySelector('#models table').replaceChildren(make('thead', '', head), make('tbody', '', ...rows));
}

function update(changes = {}) {
  Object.assign(state, changes);
  if ('cat' in changes && state.sub && !choices('sub').some(([v]) => v === state.sub)) state.sub = '';
  if (!table(state.model, state.modality)) state.modality = choices('modality')[0][0];
  shown = chosen();
  showControls(); showStatus();
  if (byId('models').open) showModels();
  current = -1;
  const above = list.getBoundingClientRect().top - bar.offsetHeight;
  if (above < 0) scrollBy(0, above - 8);
  layOut();
  writeAddress();
}

// ---- rows: only those near the window exist

const drawn = new Map();
let height = 0;

function layOut() {
  height = parseFloat(getComputedStyle(document.documentElement).getPropertyValue('--row'));
  list.style.height = `${shown.length * height}px`;
  list.replaceChildren(); drawn.clear();
  draw();
}

function draw() {
  const above = list.getBoundingClientRect().top;
  const first = Math.max(0, Math.floor(-above / height) - 2), last = Math.min(shown.length, Math.ceil((innerHeight - above) / height) + 2);
  for (const [n, node] of drawn) if ((n < first || n >= last) && n !== current) { node.remove(); drawn.delete(n); }
  let after = null;
  for (let n = last - 1; n >= first; n--) {
    if (!drawn.has(n)) { const node = row(n); drawn.set(n, node); list.insertBefore(node, after); }
    after = drawn.get(n);
  }
}

function thumb(picture, kind, caption, name) {
  const figure = make('figure', kind);
  if (picture >= 0) {
    const image = make('img');
    image.loading = 'lazy'; image.decoding = 'async'; image.width = image.height = data.pictures.side;
    image.src = source(picture);
    image.alt = `${caption}: ${name}`;
    figure.append(image);
  } else figure.append(foreign('div', 'empty', name || 'no image'));
  figure.title = name;
  figure.append(make('figcaption', '', caption));
  return figure;
}

const MARK = {right: ' ✓', wrong: ' ✗', own: ' R'}, SAID = {right: 'right answer', wrong: 'hard negative', own: 'reference'};
function kind(i, c) {
  if (Q.pos[i].includes(c)) return 'right';
  if (Q.neg[i].includes(c)) return 'wrong';
  return data.pics[c] >= 0 && Q.ref[i].includes(data.pics[c]) ? 'own' : '';
}

function candidate(i, c, caption) {
  const k = kind(i, c);
  const figure = thumb(data.pics[c], k, caption + (MARK[k] || ''), data.names[c]);
  if (SAID[k]) figure.title += ` (${SAID[k]})`;
  return figure;
}

function asked(i, all) {   // reference and right answers
  const refs = Q.ref[i].slice(0, all ? data.shown : 1), right = Q.pos[i].slice(0, all ? data.shown : 1), more = Q.pos[i].length - right.length;
  return [...refs.map(p => thumb(p, '', 'reference', p >= 0 ? 'reference image' : 'no reference image')),
          ...right.map((c, n) => candidate(i, c, more && n === right.length - 1 ? `target +${more}` : 'target'))];
}

const ranked = (t, i) => top(t, i).map((c, n) => candidate(i, c, String(n + 1)));

function chips(i, t) {
  const rank = t.rank[i], sub = data.subcategories[Q.sub[i]], label = data.audit && data.audit.codes[data.ks.indexOf(state.k)][i];
  const found = [make('span', `chip ${rank <= state.k ? 'hit' : 'miss'}`, `rank ${number(rank)}`)];
  if (sub && sub.title) found.push(foreign('span', 'chip', sub.title));
  if (data.audit) found.push(make('span', 'chip', data.audit.details[label]));
  return found;
}

function allRanks(i) {   // of every model, in the order of the models' list
  const some = data.tables.filter(t => t.modality === state.modality).map(t => {
    const chip = make('span', `chip ${t.rank[i] <= state.k ? 'hit' : 'miss'}${t.model === state.model ? ' now' : ''}`, number(t.rank[i]));
    chip.title = t.model;
    return chip;
  });
  const node = make('div', 'ranks', make('span', 'said', 'ranks of all models:'), ...some);
  return node;
}

function link(i) {
  const a = foreign('a', '', Q.id[i]);
  a.href = address({q: Q.id[i]});
  a.tabIndex = -1;
  a.addEventListener('click', event => { if (event.ctrlKey || event.metaKey || event.shiftKey) event.stopPropagation(); else event.preventDefault(); });
  return a;
}

function row(n) {
  const i = shown[n], t = table(state.model, state.modality), node = make('article');
  const text = foreign('p', 'text', Q.text[i]);
  text.title = Q.text[i];
  const meta = make('div', 'meta', link(i), ...chips(i, t));
  node.append(make('div', 'what', meta, text, ...(data.models.length > 1 ? [allRanks(i)] : [])), make('div', 'strip', ...asked(i, false), make('div', 'gap'), ...ranked(t, i)));
  node.style.top = `${n * height}px`;
  node.tabIndex = n === Math.max(current, 0) ? 0 : -1;
  node.setAttribute('aria-posinset', n + 1);
  node.setAttribute('aria-setsize', shown.length);
  node.setAttribute('aria-label', `${Q.text[i] || Q.id[i]}, rank ${t.rank[i]}`);
  node.dataset.n = n;
  return node;
}

function go(n) {
  if (!shown.length) return;
  n = Math.min(Math.max(n, 0), shown.length - 1);
  const y = list.getBoundingClientRect().top + n * height, low = bar.getBoundingClientRect().bottom + 6;
  if (y < low) scrollBy(0, y - low);
  else if (y + height > innerHeight) scrollBy(0, y + height - innerHeight);
  if (drawn.has(current)) drawn.get(current).tabIndex = -1;
  current = n;
  draw();
  drawn.get(n).tabIndex = 0;
  drawn.get(n).focus({preventScroll: true});
}

// ---- one query, all models

function button(text, label, act) {
  const node = make('button', '', text);
  node.type = 'button';
  node.setAttribute('aria-label', label);
  node.addEventListener('click', act);
  return node;
}

function results(i, modality) {
  const rows = data.tables.filter(t => t.modality === modality).map(t => {
    const label = make('div', 'name', foreign('div', '', t.model), make('span', `chip ${t.rank[i] <= state.k ? 'hit' : 'miss'}`, `rank ${number(t.rank[i])}`));
    return make('div', t.model === state.model && modality === state.modality ? 'run now' : 'run', label, make('div', 'strip', ...ranked(t, i)));
  });
  return [make('h3', '', `Query shows ${data.words[modality] || modality}`), ...rows];
}

function open(id) {
  const i = place.get(id);
  if (i === undefined) { state.q = ''; byId('status').append(` There is no query ${JSON.stringify(id)} in this page.`); return; }
  state.q = id;
  const n = shown.indexOf(i), sub = data.subcategories[Q.sub[i]];
  const title = foreign('h2', '', id);
  title.id = 'one-id';
  const head = make('div', 'head', title, button('←', 'previous query', () => step(-1)), button('→', 'next query', () => step(1)), button('Close', 'close', () => dialog.close()));
  const facts = [data.categories[Q.cat[i]], sub && sub.title, data.audit && `${data.audit.details[data.audit.codes[data.ks.indexOf(state.k)][i]]} at ${state.k}`,
                 n >= 0 ? `${number(n + 1)} of ${number(shown.length)} shown` : 'outside the filters'].filter(Boolean);
  const order = [state.modality, ...data.modalities.filter(o => o !== state.modality)];
  const wrong = Q.neg[i].slice(0, data.shown).map(c => candidate(i, c, 'hard negative'));
  dialog.replaceChildren(head, make('div', 'meta', ...facts.map(f => foreign('span', 'chip', f))), foreign('p', 'text', Q.text[i]),
                         make('div', 'strip', ...asked(i, true), ...(wrong.length ? [make('div', 'gap'), ...wrong] : [])), ...order.flatMap(o => results(i, o)));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  writeAddress();
}

function step(by) {
  const n = shown.indexOf(place.get(state.q)), to = shown[n < 0 ? 0 : n + by];
  if (to !== undefined) open(Q.id[to]);
}

// ---- events

for (const key of ['model', 'modality', 'k', 'cat', 'sub', 'label', 'sort'])
  byId(key).addEventListener('change', event => update({[key]: key === 'k' ? Number(event.target.value) : event.target.value}));
byId('show').append(...OUTCOMES.map(([value, text]) => {
  const input = make('input');
  Object.assign(input, {type: 'radio', name: 'show', value});
  input.addEventListener('change', () => update({show: value}));
  return make('label', '', input, make('span', '', text));
}));
byId('find').addEventListener('input', event => update({find: event.target.value}));
for (const id of ['reset', 'reset2']) byId(id).addEventListener('click', () => update({...DEFAULTS}));
byId('models').addEventListener('toggle', () => { if (byId('models').open) showModels(); draw(); });
byId('about').addEventListener('toggle', () => draw());
byId('folded').addEventListener('toggle', () => draw());
bar.addEventListener('submit', event => event.preventDefault());

list.addEventListener('click', event => {
  const node = event.target.closest('article');
  if (node && !event.ctrlKey && !event.metaKey && !event.shiftKey && !String(getSelection())) { current = Number(node.dataset.n); open(Q.id[shown[current]]); }
});
list.addEventListener('focusin', event => { const node = event.target.closest('article'); if (node) current = Number(node.dataset.n); });
list.addEventListener('keydown', event => {
  const page = Math.max(1, Math.floor(innerHeight / height) - 2);
  const by = {ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -N, End: N}[event.key];
  if (event.key === 'Enter') open(Q.id[shown[current]]);
  else if (by) go(current + by);
  else return;
  event.preventDefault();
});
dialog.addEventListener('keydown', event => { const by = {ArrowLeft: -1, ArrowRight: 1}[event.key]; if (by) { event.preventDefault(); step(by); } });
dialog.addEventListener('close', () => {
  const n = shown.indexOf(place.get(state.q));
  state.q = '';
  writeAddress();
  if (n >= 0) go(n);
});
document.addEventListener('keydown', event => {
  if (event.key === '/' && !dialog.open && !event.target.closest('input, select')) { event.preventDefault(); byId('folded').open = true; byId('find').focus(); }
});

function fold() {   // the filters, where they would leave little room: on a phone, in a notebook
  const little = innerWidth <= NARROW || window !== window.parent;
  if (little !== document.body.classList.contains('folds')) byId('folded').open = !little;
  document.body.classList.toggle('folds', little);
}

let asleep = true;
addEventListener('scroll', () => { if (asleep) { asleep = false; requestAnimationFrame(() => { asleep = true; draw(); }); } }, {passive: true});
addEventListener('resize', () => {
  fold();
  layOut();
  if (current >= 0 && !dialog.open && document.activeElement === document.body) go(current);
});
addEventListener('hashchange', start);

function start() {
  readAddress();
  const id = state.q;
  update();
  if (id) open(id); else if (dialog.open) dialog.close();
}

fold();
start();
performance.mark('ready');
})();
