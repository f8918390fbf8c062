// Markdown as elements. Three walls stand between what a model writes and what runs here: markdown-it takes HTML for text, DOMPurify lets
// a short list of elements through, and the page's Content-Security-Policy runs no script but the page's own.
'use strict';

const markdown = (() => {
  const parser = window.markdownit({html: false, linkify: false, breaks: true});
  // A link goes to the web or writes a mail; all else stays text.
  parser.validateLink = address => /^(https?:\/\/|mailto:)/i.test(address.trim());
  // An image would be fetched, and tell its server that this was read: it becomes a link.
  parser.renderer.rules.image = (tokens, index) => {
    const {escapeHtml} = parser.utils;
    const address = escapeHtml(tokens[index].attrGet('src'));
    return `<a href="${address}">${escapeHtml(tokens[index].content) || address}</a>`;
  };
  // Styles are none of the model's: columns of tables keep their side in an attribute.
  for (const name of ['th_open', 'td_open']) {
    parser.renderer.rules[name] = (tokens, index, options, env, self) => {
      const style = tokens[index].attrIndex('style');
      if (style >= 0) tokens[index].attrs[style] = ['align', tokens[index].attrs[style][1].replace('text-align:', '')];
      return self.renderToken(tokens, index, options);
    };
  }

  const allowed = {
    ALLOWED_TAGS: ['p', 'br', 'hr', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6', 'strong', 'em', 's', 'code', 'pre', 'blockquote', 'ul', 'ol', 'li', 'table',
      'thead', 'tbody', 'tr', 'th', 'td', 'a'],
    ALLOWED_ATTR: ['href', 'title', 'start', 'align', 'class'],
    ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  };

  function elements(html) {
    const fragment = DOMPurify.sanitize(html, allowed);
    for (const link of fragment.querySelectorAll('a')) {
      link.target = '_blank';
      link.rel = 'noopener noreferrer nofollow';
      link.title = link.href;
    }
    for (const code of fragment.querySelectorAll('pre > code')) {
      const head = make('div', {className: 'code-head'}, make('span', {}, code.className.replace('language-', '')),
        make('button', {type: 'button', className: 'copy-code'}, 'Copy'));
      const block = make('div', {className: 'block-code'});
      code.parentElement.replaceWith(block);
      block.append(head, code.parentElement);
    }
    for (const each of fragment.querySelectorAll('[class]:not(.block-code, .block-code *)')) each.removeAttribute('class');
    for (const table of fragment.querySelectorAll('table')) {
      const block = make('div', {className: 'table'});
      table.replaceWith(block);
      block.append(table);
    }
    return fragment;
  }

  // The blocks of a text as HTML, one string each. A later text that begins the same has the same first strings.
  function blocks(text) {
    const env = {};
    const html = [];
    let begun = [], depth = 0;
    for (const token of parser.parse(text, env)) {
      begun.push(token);
      depth += token.nesting;
      if (depth > 0) continue;
      html.push(parser.renderer.render(begun, parser.options, env));
      begun = [];
    }
    return html;
  }

  // Shows a text in an element; of one that has grown only the blocks that changed are made anew.
  function show(element, text) {
    const html = blocks(text);
    const shown = element.shownBlocks ?? [];
    html.forEach((each, i) => {
      if (shown[i] === each) return;
      const block = make('div', {}, elements(each));
      if (element.children[i]) element.children[i].replaceWith(block);
      else element.append(block);
    });
    while (element.children.length > html.length) element.lastChild.remove();
    element.shownBlocks = html;
  }

  return {show};
})();
