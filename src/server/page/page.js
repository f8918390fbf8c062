// The page: which talk is shown, what is typed, which replies grow. Everything that happens begins here.
'use strict';

const store = new TalkStore();
const SAVE_MS = 700;             // a growing reply is saved this often, so that a reload keeps it
const DRAW_MS = 60;              // and drawn this often, less often where drawing takes long

const page = {
  model: {id: '', context_length: 0},
  talk: null,                    // what is shown
  running: new Map(),            // talk id -> {talk, message, abort, began, nChunks, view}
  views: [],                     // of talk.messages, null for tools' results
  editing: -1,                   // the message that what is typed will replace
  follows: true,                 // the end of the talk stays in sight
};

// ---- talks

function newTalk() {
  let settings = {};
  try {
    settings = JSON.parse(words.read('settings') || '{}');
  } catch { /* somebody else's, under our name */ }
  return {id: crypto.randomUUID?.() ?? Date.now().toString(36) + Math.random().toString(36).slice(2), title: '', updated: Date.now(), settings, messages: []};
}

async function save(talk) {
  talk.updated = Date.now();
  try {
    await store.write(talk);
  } catch {
    toast('This talk could not be kept: the browser has no room. Delete others.');
  }
}

async function showTalks() {
  const heads = await store.heads();
  const rows = heads.map(head => {
    const open = make('button', {type: 'button', className: 'open', title: head.title},
      make('span', {textContent: head.title}), make('span', {className: 'when', textContent: page.running.has(head.id) ? 'writing…' : when(head.updated)}));
    open.addEventListener('click', () => { location.hash = head.id; closeMenu(); });
    const remove = make('button', {type: 'button', className: 'icon delete'}, icon('cross'));
    remove.setAttribute('aria-label', `Delete the talk ${head.title}`);
    remove.addEventListener('click', () => deleteTalk(head.id));
    const row = make('li', {className: head.id === page.talk.id ? 'current' : ''}, open, remove);
    if (head.id === page.talk.id) open.setAttribute('aria-current', 'page');
    return row;
  });
  find('talks').replaceChildren(...rows);
  find('no-talks').textContent = !store.isKept ? 'This browser keeps nothing: talks end with this page.' : heads.length ? '' : 'Talks are kept in this browser.';
}

// The talk of the address, or a new one.
async function openTalk() {
  const id = location.hash.slice(1);
  if (page.talk && page.talk.id === id) return;
  let talk = page.running.get(id)?.talk;
  if (!talk && id) {
    talk = await store.read(id);
    endUnfinished(talk);
  }
  if (!talk && id) history.replaceState(null, '', location.pathname);   // deleted, or never here
  page.talk = talk ?? newTalk();
  cancelEdit();
  page.follows = true;
  showTalk();
  await showTalks();
}

// A reply that a reload has cut: what had come stays.
function endUnfinished(talk) {
  const message = talk?.messages.at(-1);
  if (!message?.unfinished) return;
  delete message.unfinished;
  if (!message.content && !message.reasoning && !message.tool_calls) talk.messages.pop();
  else message.note = {text: 'The page was left before this reply had ended.'};
}

async function deleteTalk(id) {
  stop(id);
  page.running.delete(id);
  const talk = await store.read(id);
  await store.remove(id);
  if (page.talk.id === id) {
    history.replaceState(null, '', location.pathname);
    page.talk = null;
    await openTalk();
  } else {
    await showTalks();
  }
  find('message').focus();
  if (talk)
    toast('The talk is deleted.', 'Undo', async () => {
      await store.write(talk);
      if (location.hash.slice(1) === talk.id) await showTalks();
      else location.hash = talk.id;
    });
}

// ---- what is shown

function showTalk() {
  const {talk} = page;
  const run = page.running.get(talk.id);
  const results = new Map(talk.messages.filter(each => each.role === 'tool').map(each => [each.tool_call_id, each.content]));
  const lastReply = talk.messages.findLastIndex(each => each.role !== 'tool');
  page.views = talk.messages.map((message, i) => {
    if (message.role === 'tool') return null;
    if (message.role === 'user') return {element: userView(message, {copy, edit: () => edit(i)})};
    const view = new ReplyView(message, {copy, again, result: giveResult, ways});
    if (run?.message === message) run.view = view;
    const isLast = i === lastReply && talk.messages[i].role === 'assistant';
    view.update({running: run?.message === message, results, isLast: isLast && !run, takesResults: isLast});
    return view;
  });
  talk.messages.forEach((message, i) => page.views[i]?.element.classList.toggle('left-out', Boolean(message.left_out)));
  find('log').replaceChildren(...page.views.filter(Boolean).map(view => view.element));
  const isEmpty = talk.messages.length === 0;
  find('empty').hidden = !isEmpty || !find('key-form').hidden;
  find('title').textContent = talk.title || 'New talk';
  document.title = talk.title ? `${talk.title} – beryl` : 'beryl';
  // A message that nothing has answered, after a reload or a failure.
  if (!run && talk.messages.at(-1)?.role === 'user')
    find('log').append(make('div', {className: 'note'}, 'There is no reply yet.', make('div', {}, action('Ask for one', () => reply(talk)))));
  showState();
  toEnd();
}

function showState() {
  const run = page.running.get(page.talk.id);
  find('stop').hidden = !run;
  find('send').hidden = Boolean(run);
  find('send').disabled = !find('message').value.trim();
  const stats = page.talk.messages.findLast(each => each.stats)?.stats;
  // The last token of a full context is in the reply, but in no cache.
  const most = page.model.context_length, used = Math.min(stats?.total ?? 0, most);
  find('context').hidden = !used;
  find('context-text').textContent = `context ${count.format(used)} of ${count.format(most)}`;
  find('context-meter').value = most ? used / most : 0;
  showProgress(run);
}

function showProgress(run) {
  let text = '';
  if (run) {
    const seconds = (performance.now() - run.began) / 1000;
    const decoding = (performance.now() - run.firstAt) / 1000;
    text = !run.nChunks ? `reading… ${seconds.toFixed(0)} s` : run.nChunks < 4 ? 'writing…' : `writing… about ${amount(run.nChunks / decoding)} tok/s`;
  }
  if (find('progress').textContent !== text) find('progress').textContent = text;
}
setInterval(() => {
  const run = page.talk && page.running.get(page.talk.id);
  if (run) showProgress(run);
}, 1000);

function isAtEnd() {
  const box = find('scroll');
  return box.scrollHeight - box.scrollTop - box.clientHeight < 48;
}
function toEnd() {
  if (page.follows) find('scroll').scrollTop = find('scroll').scrollHeight;
  find('to-end').hidden = isAtEnd();
}

let toastTimer = 0;
function toast(text, label = '', run = null) {
  const [words, button] = find('toast').children;
  words.textContent = text;
  button.hidden = !run;
  button.textContent = label;
  button.onclick = () => { find('toast').hidden = true; run(); };
  find('toast').hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { find('toast').hidden = true; }, run ? 10000 : 4000);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Not given to pages from other machines without TLS.
    const field = make('textarea', {value: text, className: 'hidden'});
    document.body.append(field);
    field.select();
    document.execCommand('copy');
    field.remove();
  }
  toast('Copied.');
}

// ---- talking

function send() {
  const text = find('message').value.trim();
  const {talk} = page;
  if (!text || page.running.has(talk.id)) return;
  if (page.editing >= 0) talk.messages.length = page.editing;
  talk.messages.push({role: 'user', content: text});
  if (!talk.title) talk.title = text.replace(/\s+/g, ' ').slice(0, 200);
  find('message').value = '';
  cancelEdit();
  fitField();
  if (location.hash.slice(1) !== talk.id) history.pushState(null, '', '#' + talk.id);
  page.follows = true;
  reply(talk);
}

function edit(index) {
  page.editing = index;
  find('message').value = page.talk.messages[index].content;
  find('editing').hidden = false;
  fitField();
  showState();
  find('message').focus();
}
function cancelEdit() {
  page.editing = -1;
  find('editing').hidden = true;
}

function again() {
  const {talk} = page;
  talk.messages.length = talk.messages.findLastIndex(each => each.role === 'assistant');
  reply(talk);
}

function giveResult(call, text) {
  const {talk} = page;
  talk.messages.push({role: 'tool', tool_call_id: call.id, content: text});
  const calls = talk.messages.findLast(each => each.role === 'assistant').tool_calls;
  const answered = new Set(talk.messages.filter(each => each.role === 'tool').map(each => each.tool_call_id));
  if (calls.every(each => answered.has(each.id))) return reply(talk);
  save(talk);
  showTalk();
}

// What can be done about a reply that ended early.
function ways(note) {
  const all = [];
  if (note.full) {
    if (secondMessage() >= 0) all.push(action('Leave the oldest message out and try again', leaveOut));
    all.push(action('New talk', () => find('new-talk').click()));
  }
  return all;
}

// The oldest message that is sent is the first; where the second is. -1: there is none.
function secondMessage() {
  const {messages} = page.talk;
  const first = messages.findIndex(each => !each.left_out);
  return messages.findIndex((each, i) => i > first && each.role === 'user');
}

// The oldest message and what answered it are shown, but sent no more.
function leaveOut() {
  for (const each of page.talk.messages.slice(0, secondMessage())) each.left_out = true;
  again();
}

function stop(id) {
  page.running.get(id)?.abort.abort();
}

// The talk as the server wants it. A user's messages that nothing came between are one: some models' formats want turns.
function requestOf(talk) {
  const {system, tools, reasoning, ...numbers} = talk.settings;
  const messages = system ? [{role: 'system', content: system}] : [];
  for (const each of talk.messages) {
    if (each.left_out) continue;
    if (each.role === 'assistant') {
      if (!each.content && !each.tool_calls) continue;
      messages.push({role: 'assistant', content: each.content, ...(each.reasoning ? {reasoning_content: each.reasoning} : {}),
        ...(each.tool_calls ? {tool_calls: each.tool_calls} : {})});
    } else if (each.role === 'tool') {
      messages.push({role: 'tool', tool_call_id: each.tool_call_id, content: each.content});
    } else if (messages.at(-1)?.role === 'user') {
      messages.at(-1).content += '\n\n' + each.content;
    } else {
      messages.push({role: 'user', content: each.content});
    }
  }
  return {model: page.model.id, messages, ...numbers, ...(reasoning ? {reasoning_effort: reasoning} : {}), ...(tools ? {tools: JSON.parse(tools)} : {})};
}

function add(message, delta) {
  if (delta.reasoning_content) message.reasoning += delta.reasoning_content;
  if (delta.content) message.content += delta.content;
  for (const part of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = message.tool_calls[part.index] ??= {id: part.id, type: 'function', function: {name: '', arguments: ''}};
    call.function.name += part.function?.name ?? '';
    call.function.arguments += part.function?.arguments ?? '';
  }
}

// Asks for the next message of this talk and shows it as it comes.
async function reply(talk) {
  if (page.running.has(talk.id)) return;
  const message = {role: 'assistant', content: '', reasoning: '', unfinished: true};
  const run = {talk, message, abort: new AbortController(), began: performance.now(), firstAt: 0, nChunks: 0, view: null};
  let request;
  try {
    request = requestOf(talk);
  } catch {
    return toast('The tools of this talk are no JSON: see the settings.');
  }
  talk.messages.push(message);
  page.running.set(talk.id, run);
  if (page.talk === talk) showTalk();
  save(talk).then(showTalks);

  let finish = '', drawAt = 0, saveAt = 0, timer = 0;
  const draw = () => {
    timer = 0;
    if (page.talk !== talk || !page.running.has(talk.id)) return;
    const begin = performance.now();
    run.view.update({running: true});
    showProgress(run);
    toEnd();
    drawAt = performance.now() + Math.max(DRAW_MS, 4 * (performance.now() - begin));
  };
  try {
    for await (const chunk of api.reply(request, run.abort.signal)) {
      const choice = chunk.choices[0];
      const stats = message.stats ??= null;
      if (chunk.usage)
        message.stats = {...stats, prompt: chunk.usage.prompt_tokens, reply: chunk.usage.completion_tokens, total: chunk.usage.total_tokens,
          reused: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0};
      if (!choice) continue;
      const {delta} = choice;
      if (delta.content || delta.reasoning_content || delta.tool_calls) {
        run.firstAt ||= performance.now();
        ++run.nChunks;
        if (delta.content && message.reasoning && !message.content) message.thought_seconds = (performance.now() - run.firstAt) / 1000;
      }
      add(message, delta);
      if (choice.finish_reason) finish = choice.finish_reason;
      if (chunk.timings) message.stats = {...message.stats, rate: chunk.timings.predicted_per_second, prompt_seconds: (chunk.timings.queue_ms + chunk.timings.prompt_ms) / 1000};
      if (!timer) timer = setTimeout(draw, Math.max(0, drawAt - performance.now()));
      if (run.nChunks && performance.now() > saveAt) {
        saveAt = performance.now() + SAVE_MS;
        save(talk);
      }
    }
    if (finish === 'length') {
      const full = message.stats && page.model.context_length && message.stats.total >= page.model.context_length;
      message.note = full ? {text: `The context of ${count.format(page.model.context_length)} tokens is full: the reply ends here.`, full}
                          : {text: 'The reply ended at the most tokens that a reply may have (settings).'};
    }
  } catch (error) {
    if (error.name === 'AbortError') {
      message.note = {text: 'Stopped.'};
    } else {
      message.note = {text: error.message, bad: true, full: error.code === 'context_length_exceeded'};
      if (error.status === 401) askForKey(error.message);
    }
  }
  clearTimeout(timer);
  delete message.unfinished;
  if (!page.running.has(talk.id)) return;    // deleted meanwhile
  page.running.delete(talk.id);
  await save(talk);
  if (page.talk === talk) showTalk();
  await showTalks();
}

// ---- key and settings

function askForKey(problem = '') {
  find('key-form').hidden = false;
  find('key-setting').hidden = false;
  find('empty').hidden = true;
  find('key-error').textContent = problem;
  find('key').focus();
}

async function findModel() {
  find('key-setting').hidden = !words.read('key');
  try {
    page.model = await api.model();
    find('model').textContent = page.model.id;
    find('empty-model').textContent = `You are talking with ${page.model.id}. The talk stays between this browser and its server.`;
    find('key-form').hidden = true;
    if (page.talk) showTalk();
    return true;
  } catch (error) {
    if (error.status === 401) askForKey(words.read('key') ? 'The server does not know this key.' : '');
    else find('model').textContent = error.message;
    return false;
  }
}

function openSettings() {
  const fields = find('settings-form').elements;
  for (const field of fields) if (field.name && field.name !== 'key') field.value = page.talk.settings[field.name] ?? '';
  fields.key.value = words.read('key');
  find('settings-error').textContent = '';
  find('settings').showModal();
}

// What the fields say; null: something is wrong, and told.
function readSettings() {
  const settings = {};
  for (const field of find('settings-form').elements) {
    const text = field.value.trim();
    if (!field.name || field.name === 'key' || !text) continue;
    settings[field.name] = field.type === 'number' ? Number(text) : text;
  }
  try {
    const tools = settings.tools && JSON.parse(settings.tools);
    if (tools && !Array.isArray(tools)) throw new Error('a list was expected');
  } catch (error) {
    find('settings-error').textContent = `Tools: ${error.message}`;
    find('settings-error').scrollIntoView({ block: 'nearest' });
    return null;
  }
  return settings;
}

find('settings-form').addEventListener('submit', async event => {
  const settings = readSettings();
  if (!settings) return event.preventDefault();
  page.talk.settings = settings;
  words.write('settings', JSON.stringify(settings));
  if (page.talk.messages.length && !page.running.has(page.talk.id)) await save(page.talk);
  const key = find('settings-form').elements.key.value.trim();
  if (key !== words.read('key')) {
    words.write('key', key);
    findModel();
  }
});
find('close-settings').addEventListener('click', () => find('settings').close());
find('clear-settings').addEventListener('click', () => {
  for (const field of find('settings-form').elements) if (field.name && field.name !== 'key') field.value = '';
});
find('key-form').addEventListener('submit', async event => {
  event.preventDefault();
  words.write('key', find('key').value.trim());
  if (await findModel()) find('message').focus();
});

// ---- hands

// Grows with what is typed, up to a share of the window.
function fitField() {
  const field = find('message');
  field.style.height = 'auto';
  field.style.height = field.scrollHeight + 'px';
}
document.querySelector('.skip').addEventListener('click', event => { event.preventDefault(); find('message').focus(); });   // the address names a talk
const isTouch = matchMedia('(pointer: coarse)');
find('message').addEventListener('input', () => { fitField(); showState(); });
find('message').addEventListener('keydown', event => {
  // On a phone Enter makes a line, as everywhere there. isComposing: it ends a word of an input method.
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing || isTouch.matches) return;
  event.preventDefault();
  send();
});
find('composer').addEventListener('submit', event => { event.preventDefault(); send(); });
find('stop').addEventListener('click', () => { stop(page.talk.id); find('message').focus(); });
find('cancel-edit').addEventListener('click', () => { find('message').value = ''; cancelEdit(); fitField(); showState(); });
find('new-talk').addEventListener('click', async () => {
  closeMenu();
  history.pushState(null, '', location.pathname);
  page.talk = null;
  await openTalk();
  find('message').focus();
});
for (const idea of find('ideas').children)
  idea.addEventListener('click', () => { find('message').value = idea.textContent; fitField(); showState(); find('message').focus(); });
find('log').addEventListener('click', event => {
  if (event.target.matches('.copy-code')) copy(event.target.closest('.block-code').querySelector('pre').textContent);
});
find('scroll').addEventListener('scroll', () => { page.follows = isAtEnd(); find('to-end').hidden = page.follows; }, {passive: true});
find('to-end').addEventListener('click', () => { page.follows = true; toEnd(); });
find('open-settings').addEventListener('click', openSettings);
find('theme').addEventListener('click', () => toast({auto: 'Colours as the system has them.', light: 'Light.', dark: 'Dark.'}[theme.next()]));

// The list of talks, where it slides in, is out of reach of the keyboard while it is out of sight (visibility in page.css).
function closeMenu() {
  if (!document.body.classList.contains('menu-open')) return;
  document.body.classList.remove('menu-open');
  find('open-menu').setAttribute('aria-expanded', 'false');
  find('open-menu').focus();
}
find('open-menu').addEventListener('click', () => {
  document.body.classList.add('menu-open');
  find('open-menu').setAttribute('aria-expanded', 'true');
  find('close-menu').focus();
});
find('close-menu').addEventListener('click', closeMenu);
find('shade').addEventListener('click', closeMenu);
addEventListener('keydown', event => {
  if (event.key !== 'Escape' || find('settings').open) return;
  if (document.body.classList.contains('menu-open')) closeMenu();
  else if (page.running.has(page.talk.id)) stop(page.talk.id);
  else if (page.editing >= 0) find('cancel-edit').click();
});
addEventListener('hashchange', openTalk);
addEventListener('popstate', openTalk);
addEventListener('visibilitychange', () => {
  for (const run of page.running.values()) save(run.talk);
  if (!document.hidden && page.talk) showTalks();   // another tab may have written some
});

openTalk().then(findModel).then(found => { if (found && !isTouch.matches) find('message').focus(); });   // a phone would cover half the page with keys
