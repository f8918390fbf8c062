// GET /: the chat page, one document that tools/pack_page.py makes of src/server/page/ and two libraries.
#pragma once

#include <string_view>

#include "server/http_server.h"

namespace beryl::server {

struct Page {
  std::string_view html;
  std::string_view policy;   // Content-Security-Policy: its own scripts and style by digest, its own server, nothing else
  std::string_view etag;
};
extern const Page kPage;     // only where the libraries were there when beryl was built

bool has_page();
// The page needs no key: what it asks for does. 304 for who has it already; 404, with the reason, where there is none.
HttpResponse answer_page(const HttpRequest& request);

}  // namespace beryl::server
