// From messages to elements. What users and tools say is shown as text, replies as Markdown.
'use strict';

const find = id => document.getElementById(id);

function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

function icon(name) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const use = document.createElementNS('http://www.w3.org/2000/svg', 'use');
  use.setAttribute('href', '#icon-' + name);
  svg.append(use);
  return svg;
}

const count = new Intl.NumberFormat('en');
const amount = n => n < 10 ? n.toFixed(2) : n < 100 ? n.toFixed(1) : count.format(Math.round(n));
const tokens = n => `${count.format(n)} token${n === 1 ? '' : 's'}`;

function when(time) {
  const date = new Date(time), today = new Date();
  const sameDay = date.toDateString() === today.toDateString();
  return date.toLocaleString([], sameDay ? {hour: '2-digit', minute: '2-digit'} : {day: 'numeric', month: 'short', year: 'numeric'});
}

function action(label, run) {
  const button = make('button', {type: 'button'}, label);
  button.addEventListener('click', run);
  return button;
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

// "87 tokens · 45.3 tok/s · prompt 310, 248 of them reused, in 0.42 s"
function statsText(stats) {
  const parts = [tokens(stats.reply)];
  if (stats.reply > 1 && stats.rate > 0) parts.push(`${amount(stats.rate)} tok/s`);
  parts.push(`prompt ${count.format(stats.prompt)}${stats.reused ? `, ${count.format(stats.reused)} of them reused` : ''}, in ${amount(stats.prompt_seconds)} s`);
  return parts.join(' · ');
}

function userView(message, actions) {
  const view = make('div', {className: 'message user'}, make('div', {className: 'said', dir: 'auto', textContent: message.content}));
  view.append(make('div', {className: 'actions'}, action('Copy', () => actions.copy(message.content)), action('Edit', actions.edit)));
  return view;
}

// A reply that may still grow: update() shows what the message holds by now.
class ReplyView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.element = make('article', {className: 'message assistant'});
    this.thought = make('details', {className: 'thought', hidden: true}, make('summary'), make('div', {dir: 'auto'}));
    this.answer = make('div', {className: 'answer', dir: 'auto'});
    this.waiting = make('span', {className: 'waiting', hidden: true}, make('i'), make('i'), make('i'));
    this.waiting.setAttribute('aria-hidden', 'true');
    this.calls = make('div');
    this.note = make('div', {hidden: true});
    this.foot = make('div', {className: 'actions', hidden: true});
    this.element.append(this.thought, this.answer, this.waiting, this.calls, this.note, this.foot);
  }

  // running: it grows. results: what the tools said, by the call's id; takesResults: the last ones are still wanted.
  update({running = false, results = new Map(), takesResults = false, isLast = false} = {}) {
    const {message} = this;
    const thinks = running && message.reasoning && !message.content && !message.tool_calls;
    this.element.setAttribute('aria-busy', running);
    this.waiting.hidden = !running || Boolean(message.content) || Boolean(message.reasoning);
    this.thought.hidden = !message.reasoning;
    if (message.reasoning) {
      const [summary, text] = this.thought.children;
      summary.textContent = thinks ? 'Thinking…' : message.thought_seconds ? `Thought for ${amount(message.thought_seconds)} s` : 'Thought';
      if (text.textContent !== message.reasoning) text.textContent = message.reasoning;
    }
    markdown.show(this.answer, message.content);
    if (!running || message.tool_calls?.length !== this.calls.children.length)
      this.calls.replaceChildren(...(message.tool_calls ?? []).map(call => this.callView(call, results.get(call.id), takesResults && !running)));
    if (running) return;
    this.note.hidden = !message.note;
    if (message.note) {
      this.note.className = message.note.bad ? 'note bad' : 'note';
      if (message.note.bad) this.note.setAttribute('role', 'alert');
      this.note.replaceChildren(message.note.text, make('div', {}, ...(isLast ? this.actions.ways(message.note) : [])));
    }
    this.foot.hidden = false;
    this.foot.replaceChildren();
    if (message.stats) this.foot.append(make('span', {className: 'numbers', textContent: statsText(message.stats)}));
    if (message.content) this.foot.append(action('Copy', () => this.actions.copy(message.content)));
    if (isLast) this.foot.append(action('Try again', this.actions.again));
  }

  callView(call, result, takesResult) {
    const view = make('div', {className: 'call'},
      make('p', {}, 'Calls ', make('b', {textContent: call.function.name})), make('pre', {textContent: pretty(call.function.arguments)}));
    if (result !== undefined) {
      view.append(make('p', {textContent: 'Result'}), make('pre', {textContent: result}));
    } else if (takesResult) {
      const field = make('textarea', {rows: 2, required: true, placeholder: 'What the tool answers', className: 'code'});
      field.setAttribute('aria-label', `Result of ${call.function.name}`);
      const form = make('form', {}, field, make('button', {className: 'primary'}, 'Give the result'));
      form.addEventListener('submit', event => {
        event.preventDefault();
        this.actions.result(call, field.value);
      });
      view.append(form);
    }
    return view;
  }
}
