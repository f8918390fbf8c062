#include "server/page.h"

#include "server/api_error.h"

namespace beryl::server {

bool has_page() {
#ifdef BERYL_HAS_PAGE
  return true;
#else
  return false;
#endif
}

HttpResponse answer_page([[maybe_unused]] const HttpRequest& request) {
#ifdef BERYL_HAS_PAGE
  HttpResponse response;
  response.content_type = "text/html; charset=utf-8";
  response.headers = {{"Content-Security-Policy", std::string(kPage.policy)},
                      {"X-Content-Type-Options", "nosniff"},
                      {"X-Frame-Options", "DENY"},
                      {"Referrer-Policy", "no-referrer"},
                      {"Cross-Origin-Opener-Policy", "same-origin"},
                      {"Cross-Origin-Resource-Policy", "same-origin"},
                      {"Permissions-Policy", "camera=(), microphone=(), geolocation=()"},
                      {"Cache-Control", "no-cache"},
                      {"ETag", std::string(kPage.etag)}};
  if (request.header("if-none-match") == kPage.etag) {
    response.status = 304;
  } else {
    response.body = std::string(kPage.html);
  }
  return response;
#else
  throw ApiError(404, "this beryl was built without its chat page: markdown-it and DOMPurify (libjs-markdown-it, node-dompurify) were not there");
#endif
}

}  // namespace beryl::server
