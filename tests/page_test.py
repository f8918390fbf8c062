#!/usr/bin/env python3
"""The chat page in a real browser: Chromium without a window, beryl serve, and a model whose replies are known.

    page_test.py BERYL [UNITTEST OPTIONS]

Each test has a server, and so an origin with an empty history, of its own. The driver's package lies in an environment of its own in the cache
folder; exit status 77, with a line, where there is no Chromium or that can not be had. BERYL_SCREENSHOTS=FOLDER keeps pictures.
"""
import os
import pathlib
import shutil
import sys
import tempfile
import unittest

from cli_support import Program, wait_until
from scripted_model import Loop, make_scripted_model
from server_support import ROOT, SKIPPED, Server, prepare_test_data

beryl = None
browser = None
models = None       # folder

# What a message ends with -> the reply.
HOSTILE = ("<script>document.title = 'pwned'</script> <img src=x onerror=\"document.title='pwned'\"> "
           "[link](javascript:document.title='pwned') [data](data:text/html,<script>alert(1)</script>) <svg onload=\"document.title='pwned'\"> "
           "![picture](http://127.0.0.1:9/picture.png) <iframe src=http://127.0.0.1:9/></iframe> <style>*{display:none}</style> "
           "[good](https://example.org/page) `<b>code</b>` <a href='javascript:1' onclick='1'>raw</a>")
MARKDOWN = ("# A heading\n\nWith **bold** and *slanted* words, `code`.\n\n1. first\n2. second\n   - below\n\n"
            "> quoted\n\n```python\ndef f(x):\n    return \"<b>\"\n```\n\n| left | right |\n|:-----|------:|\n| 1a | 2b |\n\nThe-end.")
SCRIPTS = {
    "": "I have nothing special to say about that.",
    "?": MARKDOWN,
    "!": Loop("on and on it goes, "),
    "x": HOSTILE,
    "t": "<think>First I <b>think</b> about it.</think>Then I speak.",
    "c": '<tool_call>{"name": "get_weather", "arguments": {"city": "<b>Paris"}}</tool_call>',
    ">": "It is sunny there.",      # behind what a tool has said
    "w": "W" * 300 + " " + "| a wide cell with many words in it " * 12 + "|\n" + "|---" * 12 + "|\n\n```\n" + "one long line of code; " * 20 + "end\n```\n",
}


class PageTest(unittest.TestCase):
    arguments = ()

    def setUp(self):
        from selenium.webdriver.common.keys import Keys
        self.keys = Keys
        self.server = Server(beryl, models / "scripted", "--device", "cpu", *(self.arguments or ("--ctx", "60000")))
        self.addCleanup(self.server.__exit__, None, None, None)
        browser.get_log("browser")
        self.open()

    def picture(self, name=""):
        """For people."""
        if folder := os.environ.get("BERYL_SCREENSHOTS"):
            browser.save_screenshot(f"{folder}/{self.id().split('.')[-1]}{name}.png")

    def set_scheme(self, scheme):
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}] if scheme else []})

    def tearDown(self):
        self.picture()
        # Nothing was blocked, nothing threw.
        self.assertEqual([entry["message"] for entry in browser.get_log("browser") if not self.is_expected(entry["message"])], [])

    def is_expected(self, message):
        return False

    # ---- what a person does and sees

    def open(self):
        browser.get(self.server.url + "/")
        self.wait(lambda: self.script("return document.getElementById('model').textContent || !document.getElementById('key-form').hidden"))

    def reload(self):
        browser.refresh()
        self.wait(lambda: self.script("return document.readyState == 'complete' && document.getElementById('model')?.textContent"))

    def script(self, text, *arguments):
        return browser.execute_script(text, *arguments)

    def find(self, css):
        return browser.find_element("css selector", css)

    def all(self, css):
        return browser.find_elements("css selector", css)

    def texts(self, css):
        return self.script("return [...document.querySelectorAll(arguments[0])].map(each => each.innerText)", css)

    def wait(self, condition):
        """Until it holds; what it says. Elements may be drawn anew while they are looked at."""
        from selenium.common.exceptions import StaleElementReferenceException, NoSuchElementException
        found = []

        def holds():
            try:
                found[:] = [condition()]
            except (StaleElementReferenceException, NoSuchElementException):
                return False
            return found[0]
        wait_until(holds, 60, 0.04)          # each look costs the browser time
        return found[0]

    def type(self, *keys):
        """Keys for whatever has the focus; a pair is the second with the first held down."""
        from selenium.webdriver.common.action_chains import ActionChains
        chain = ActionChains(browser, duration=0)
        for each in keys:
            if isinstance(each, tuple):
                chain.key_down(each[0]).send_keys(each[1]).key_up(each[0])
            else:
                chain.send_keys(each)
        chain.perform()

    def tab_to(self, css, back=False):
        for _ in range(60):
            if self.script("return document.activeElement.matches(arguments[0])", css):
                return
            self.type((self.keys.SHIFT, self.keys.TAB) if back else self.keys.TAB)
        self.fail(f"Tab does not lead to {css}, but to {self.script('return document.activeElement.outerHTML')[:200]}")

    def is_running(self):
        return self.find("#stop").is_displayed()

    def say(self, text, answered=True):
        n = len(self.all(".message.assistant"))
        self.find("#message").send_keys(text, self.keys.ENTER)
        self.wait(lambda: len(self.all(".message.assistant")) == n + 1)
        if answered:
            self.wait(lambda: not self.is_running())

    def replies(self):
        return self.texts(".answer")


class TalkTest(PageTest):
    def test_a_reply_streams_and_stops(self):
        self.say("Go!", answered=False)
        first = self.wait(lambda: self.replies()[-1])
        self.assertTrue(self.is_running())
        self.wait(lambda: len(self.replies()[-1]) > len(first) + 100)
        self.assertTrue(self.is_running())
        self.wait(lambda: "writing…" in self.find("#progress").text)
        self.find("#stop").click()
        self.wait(lambda: not self.is_running())
        self.assertEqual(self.texts(".note"), ["Stopped."])
        text = self.replies()[-1]
        self.assertTrue(text.startswith("on and on it goes, on and on it goes"))
        # The server has heard of it.
        wait_until(lambda: self.server.request("GET", "/metrics")[2].count('requests_total{finish="cancelled"} 1\n') == 1)
        # The Escape key as well. And the talk goes on.
        self.say("Once more!", answered=False)
        self.wait(lambda: self.replies()[-1])
        self.type(self.keys.ESCAPE)
        self.wait(lambda: not self.is_running())
        self.assertEqual(self.replies()[0], text)
        self.say("Well.")
        self.assertEqual(self.replies()[-1], SCRIPTS[""])
        self.assertEqual(len(self.texts(".said")), 3)

    def test_markdown_and_numbers(self):
        self.say("How?")
        self.assertEqual(self.script("""
            const shape = element => [element.localName, ...[...element.children].map(shape)].flat();
            return [...document.querySelectorAll('.answer > div > *')].map(each => shape(each).join(' '))"""),
            ["h1", "p strong em code", "ol li li ul li", "blockquote p", "div div span button pre code",
             "div table thead tr th th tbody tr td td", "p"])
        self.assertEqual(self.texts(".answer pre"), ['def f(x):\n    return "<b>"\n'])
        self.assertEqual(self.texts(".code-head span"), ["python"])
        self.assertEqual(self.script("return getComputedStyle(document.querySelector('td:last-child')).textAlign"), "right")
        # As the server counts.
        numbers = self.texts(".numbers")[0]
        self.assertRegex(numbers, r"\A\d+ tokens · [\d,.]+ tok/s · prompt \d+, in [\d.]+ s\Z")
        n_reply, n_prompt = int(numbers.split()[0]), int(numbers.split("prompt ")[1].split(",")[0])
        self.assertEqual(self.find("#context-text").text, f"context {n_reply + n_prompt} of 60,000")
        metrics = self.server.metrics()
        self.assertEqual((metrics["reply_tokens_total"], metrics["prompt_tokens_total"]), (n_reply, n_prompt))
        self.addCleanup(self.set_scheme, "")
        self.set_scheme("dark")
        self.picture("_dark")

    def test_thinking_is_folded(self):
        self.say("Do think about it")
        self.assertEqual(self.replies(), ["Then I speak."])
        thought = self.find("details.thought")
        self.assertIsNone(thought.get_attribute("open"))
        self.assertFalse(self.find("details.thought > div").is_displayed())
        self.find("details.thought summary").send_keys(self.keys.ENTER)
        self.wait(lambda: self.find("details.thought > div").is_displayed())
        self.assertEqual(self.texts("details.thought > div"), ["First I <b>think</b> about it."])

    def test_editing_and_another_reply(self):
        self.say("How?")
        self.say("Well.")
        self.find(".message.user .actions button:last-child").click()
        self.assertEqual(self.find("#message").get_attribute("value"), "How?")
        self.find("#cancel-edit").click()
        self.assertEqual(len(self.texts(".said")), 2)
        self.find(".message.user .actions button:last-child").click()
        self.find("#message").clear()
        self.find("#message").send_keys("Something else.", self.keys.ENTER)
        self.wait(lambda: self.texts(".said") == ["Something else."] and not self.is_running())
        self.assertEqual(self.replies(), [SCRIPTS[""]])
        self.all(".message.assistant .actions button")[-1].click()      # Try again
        self.wait(lambda: self.server.metrics()["reply_tokens_total"] > 0 and self.replies() == [SCRIPTS[""]] and not self.is_running())
        self.assertEqual(len(self.texts(".said")), 1)


class HistoryTest(PageTest):
    def test_reload_keeps_all_talks(self):
        self.say("First talk: how?")
        self.say("And more.")
        before = self.texts(".message .said, .message .answer, .message .numbers")
        address = browser.current_url
        self.find("#new-talk").click()
        self.wait(lambda: not self.texts(".message"))
        self.say("Second talk.")
        self.reload()
        self.assertEqual((self.texts(".said"), self.replies()), (["Second talk."], [SCRIPTS[""]]))
        self.assertEqual(self.texts("#talks .open span:first-child"), ["Second talk.", "First talk: how?"])
        self.all("#talks .open")[1].click()
        self.wait(lambda: browser.current_url == address and len(self.texts(".said")) == 2)
        self.assertEqual(self.texts(".message .said, .message .answer, .message .numbers"), before)
        # Going on with it, with all that was said before.
        self.say("Still there.")
        self.assertEqual(len(self.replies()), 3)
        browser.back()
        self.wait(lambda: self.texts(".said") == ["Second talk."])

    def test_delete_and_undo(self):
        for text in ("One.", "Two."):
            self.find("#new-talk").click()
            self.wait(lambda: not self.texts(".message"))
            self.say(text)
        self.find("#talks li.current .delete").click()
        self.wait(lambda: self.texts("#talks .open span:first-child") == ["One."] and not self.texts(".message"))
        self.find("#toast button").click()
        self.wait(lambda: self.texts(".said") == ["Two."])
        self.find("#talks li.current .delete").click()
        self.wait(lambda: self.texts("#talks .open span:first-child") == ["One."])
        self.reload()
        self.assertEqual(self.texts("#talks .open span:first-child"), ["One."])

    def test_a_reload_in_a_reply_keeps_what_had_come(self):
        self.say("Go!", answered=False)
        self.wait(lambda: browser.execute_async_script("""
            indexedDB.open('beryl').onsuccess = event => {
              event.target.result.transaction('talks').objectStore('talks').getAll().onsuccess = found => {
                event.target.result.close();
                arguments[0](found.target.result[0]?.messages[1]?.content.length > 100);
              };
            };"""))
        self.reload()
        text = self.wait(lambda: self.replies() and self.replies()[-1])
        self.assertTrue(text.startswith("on and on it goes, on and on"))
        self.assertFalse(self.is_running())
        self.assertIn("left before", self.texts(".note")[-1])
        wait_until(lambda: self.server.metrics()["requests_running"] == 0)     # the server does not talk to itself
        self.assertEqual(self.texts(".message.assistant .actions button")[-1], "Try again")

    def test_two_talks_are_written_at_once(self):
        self.say("Go!", answered=False)
        first = browser.current_url
        self.find("#new-talk").click()
        self.wait(lambda: not self.texts(".message"))
        self.say("Second.")
        self.assertEqual(self.replies(), [SCRIPTS[""]])
        browser.get(first)
        self.wait(lambda: self.is_running() and self.replies())
        self.find("#stop").click()
        self.wait(lambda: not self.is_running())
        self.assertEqual(self.texts(".said"), ["Go!"])


class HostileTest(PageTest):
    def is_expected(self, message):
        # Of test_the_policy_holds, which tries what must not work.
        return self._testMethodName == "test_the_policy_holds" and ("Content Security Policy" in message or "Trusted" in message)

    def assert_harmless(self, css):
        self.assertEqual(self.script("return [...document.querySelectorAll(arguments[0])].map(each => each.localName)",
                                     ", ".join(f"{css} {name}" for name in ("script", "img", "svg", "iframe", "style", "b", "form", "input", "object"))), [])
        self.assertEqual(self.script("""
            return [...document.querySelectorAll(arguments[0] + ' *')].flatMap(each => each.getAttributeNames())
                .filter(name => name.startsWith('on') || ['style', 'id', 'src'].includes(name))""", css), [])
        self.assertEqual(self.script("return [...document.querySelectorAll(arguments[0] + ' a')].map(each => [each.protocol, each.rel])", css),
                         [["http:", "noopener noreferrer nofollow"], ["https:", "noopener noreferrer nofollow"]] if css == ".answer" else [])
        self.assertNotEqual(browser.title, "pwned")
        # Nothing was asked of anybody but the server.
        origins = self.script("return performance.getEntriesByType('resource').map(each => new URL(each.name).origin)")
        self.assertEqual(set(origins), {self.server.url})

    def test_what_a_model_writes_is_text(self):
        self.say("Do your worst: x")
        text = self.replies()[0]
        for part in ("<script>document.title = 'pwned'</script>", "<img src=x onerror=", "[link](javascript:document.title='pwned')",
                     "<svg onload=", "<iframe src=", "<style>*{display:none}</style>", "<b>code</b>", "picture", "onclick='1'>raw</a>"):
            self.assertIn(part, text)
        self.assert_harmless(".answer")
        self.reload()                                     # also as it comes out of the history
        self.assertEqual(self.replies(), [text])
        self.assert_harmless(".answer")

    def test_what_a_user_writes_is_text(self):
        text = "<img src=x onerror=\"document.title='pwned'\"><b>bold</b>"
        self.say(text)
        self.assertEqual(self.texts(".said"), [text])
        self.assertEqual(self.texts("#talks .open span:first-child"), [text])
        self.assert_harmless(".said")
        self.assert_harmless("#talks .open")

    def test_what_a_model_calls_and_a_tool_says_is_text(self):
        self.find("#open-settings").click()
        self.find("[name=tools]").send_keys('[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]')
        self.find("#settings-form .primary").click()
        self.say("A call: c")
        self.assertEqual(self.texts(".call b"), ["get_weather"])
        self.assertEqual(self.texts(".call pre"), ['{\n  "city": "<b>Paris"\n}'])
        self.assert_harmless(".call pre")
        # The person answers the call, the model goes on.
        self.find(".call textarea").send_keys("<script>1</script> degrees")
        self.find(".call .primary").click()
        self.wait(lambda: len(self.replies()) == 2 and not self.is_running())
        self.assertEqual(self.replies()[-1], SCRIPTS[">"])
        self.assertEqual(self.texts(".call pre")[-1], "<script>1</script> degrees")
        self.reload()
        self.assertEqual(self.texts(".call pre")[-1], "<script>1</script> degrees")
        self.assertEqual(self.replies()[-1], SCRIPTS[">"])

    def test_the_policy_holds(self):
        for attempt in ("const each = document.createElement('script'); each.text = 'document.title = \"pwned\"'; document.body.append(each)",
                        "document.getElementById('log').innerHTML = '<img src=x onerror=\"document.title = 1\">'",
                        "document.getElementById('log').setAttribute('onclick', 'document.title = \"pwned\"'); document.getElementById('log').click()"):
            self.script("try { " + attempt + " } catch { }")
            self.assertNotIn("pwned", browser.title, attempt)
        # Not even a question to another port of this machine.
        self.assertEqual(browser.execute_async_script("fetch('http://127.0.0.1:9/').catch(error => arguments[0](error.name))"), "TypeError")
        self.assertTrue(any("connect-src" in entry["message"] for entry in browser.get_log("browser")))

    def test_headers(self):
        status, headers, text = self.server.request("GET", "/")
        self.assertEqual((status, headers["Content-Type"], headers["X-Content-Type-Options"]), (200, "text/html; charset=utf-8", "nosniff"))
        policy = dict(each.split(" ", 1) if " " in each else (each, "") for each in headers["Content-Security-Policy"].split("; "))
        self.assertEqual((policy["default-src"], policy["connect-src"], policy["frame-ancestors"], policy["base-uri"]),
                         ("'none'", "'self'", "'none'", "'none'"))
        for name in ("script-src", "style-src"):
            self.assertTrue(all(each.startswith("'sha256-") for each in policy[name].split()), policy[name])
        self.assertNotRegex(text, r"(?:src|href)=\"(?:https?:)?//")
        self.assertEqual(self.server.request("GET", "/", headers={"If-None-Match": headers["ETag"]})[::2], (304, ""))
        self.assertEqual(self.server.request("GET", "/", headers={"If-None-Match": '"other"'})[0], 200)
        self.assertEqual(self.server.request("HEAD", "/")[::2], (200, ""))
        self.assertEqual(self.server.request("GET", "/page.js")[0], 404)


class HandsTest(PageTest):
    def test_keyboard_only(self):
        keys = self.keys
        self.tab_to(".skip")                              # comes first
        self.type(keys.ENTER)
        self.wait(lambda: self.script("return document.activeElement.id == 'message'"))
        self.type("A line", (keys.SHIFT, keys.ENTER), "and another.", keys.ENTER)
        self.wait(lambda: self.replies() == [SCRIPTS[""]] and not self.is_running())
        self.assertEqual(self.texts(".said"), ["A line\nand another."])
        self.tab_to("#open-settings", back=True)
        self.type(keys.ENTER)
        self.wait(lambda: self.find("#settings").is_displayed())
        self.tab_to("[name=max_tokens]")
        self.type("3", keys.ENTER)                        # Enter saves
        self.wait(lambda: not self.find("#settings").is_displayed())
        self.tab_to("#message")
        self.type("How?", keys.ENTER)
        self.wait(lambda: len(self.replies()) == 2 and not self.is_running())
        self.assertRegex(self.texts(".numbers")[-1], r"\A3 tokens ")
        self.assertIn("most tokens", self.texts(".note")[-1])
        self.tab_to("#new-talk", back=True)
        self.type(keys.ENTER)
        self.wait(lambda: not self.texts(".message"))
        self.wait(lambda: self.script("return document.activeElement.id == 'message'"))
        self.tab_to("#talks .delete", back=True)
        self.type(keys.ENTER)
        self.wait(lambda: not self.all("#talks li"))
        self.tab_to("#toast button")
        self.type(keys.ENTER)
        self.wait(lambda: len(self.texts(".said")) == 2)
        # What has the focus can be seen.
        self.tab_to("#open-settings")
        self.assertEqual(self.script("return getComputedStyle(document.activeElement).outlineStyle"), "solid")

    def test_a_phone(self):
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True})
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
        self.addCleanup(browser.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})
        self.addCleanup(browser.execute_cdp_cmd, "Emulation.setTouchEmulationEnabled", {"enabled": False})
        self.reload()
        fits = "return document.documentElement.scrollWidth <= 360 && innerWidth == 360"
        self.assertTrue(self.script(fits))
        self.find("#message").send_keys("w")
        self.find("#send").click()
        self.wait(lambda: self.replies() and not self.is_running())
        self.say_on_phone("How?")
        self.assertTrue(self.script(fits))
        # Long words break, wide tables and code scroll on their own; nothing sticks out.
        self.assertEqual(self.script("""
            return [...document.querySelectorAll('#scroll, .message, .answer > div > *, #composer, header')]
                .filter(each => { const box = each.getBoundingClientRect(); return box.width && (box.left < 0 || box.right > 360.5); }).length"""), 0)
        self.assertTrue(self.script("return document.getElementById('scroll').scrollWidth <= 360"))
        for scheme in ("dark", "light"):
            self.set_scheme(scheme)
            self.picture(f"_{scheme}")
        self.set_scheme("")
        # For thumbs.
        self.assertEqual(self.script("""
            return [...document.querySelectorAll('header button, #composer button')].filter(each => each.offsetParent)
                .filter(each => each.offsetWidth < 40 || each.offsetHeight < 40).map(each => each.id)"""), [])
        # The list of talks is out of the way, and out of the keyboard's, until it is asked for.
        self.assertFalse(self.find("#new-talk").is_displayed())
        self.find("#open-menu").click()
        self.wait(lambda: self.find("#new-talk").is_displayed() and self.find("#talks .open").is_displayed())
        self.assertTrue(self.script(fits))
        self.picture("_menu")
        self.type(self.keys.ESCAPE)
        self.wait(lambda: not self.find("#new-talk").is_displayed())
        self.find("#open-settings").click()
        self.wait(lambda: self.find("#settings").is_displayed())
        self.assertTrue(self.script(fits))
        self.assertTrue(self.script("return document.querySelector('.fields').scrollWidth <= document.querySelector('.fields').clientWidth"))

    def say_on_phone(self, text):
        n = len(self.replies())
        # There Enter makes a line.
        self.find("#message").send_keys(text, self.keys.ENTER)
        self.assertEqual(len(self.replies()), n)
        self.find("#message").send_keys(self.keys.BACKSPACE)
        self.find("#send").click()
        self.wait(lambda: len(self.replies()) == n + 1 and not self.is_running())

    def test_dark_and_light(self):
        def is_dark():
            red = self.script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
            return int(red) < 128
        self.addCleanup(self.set_scheme, "")
        for wanted in ("dark", "light", "dark"):          # the system's choice, while the page is open
            self.set_scheme(wanted)
            self.wait(lambda wanted=wanted: is_dark() == (wanted == "dark"))
        self.find("#theme").click()                       # the reader's: auto, light, dark
        self.assertFalse(is_dark())
        self.reload()
        self.assertFalse(is_dark())
        self.find("#theme").click()
        self.assertTrue(is_dark())

    def test_settings_are_a_talks_own_and_a_new_ones_first(self):
        counts = [0]

        def prompt_tokens():
            """Of the last talk."""
            counts.append(self.server.metrics()["prompt_tokens_total"])
            return counts[-1] - counts[-2]

        def new_talk(text):
            self.find("#new-talk").click()
            self.wait(lambda: not self.texts(".message"))
            self.say(text)

        new_talk("One.")
        plain = prompt_tokens()
        self.find("#open-settings").click()
        for name, value in (("system", "Be brief."), ("temperature", "0.5"), ("top_p", "0.9")):
            self.find(f"[name={name}]").send_keys(value)
        self.find("#settings-form .primary").click()
        new_talk("Two.")
        self.assertEqual(prompt_tokens() - plain, 1 + len("system\nBe brief.") + 1 + len("\n"))
        self.find("#open-settings").click()
        self.assertEqual([self.find(f"[name={name}]").get_attribute("value") for name in ("system", "temperature", "top_p")], ["Be brief.", "0.5", "0.9"])
        self.find("#clear-settings").click()
        self.find("#settings-form .primary").click()
        new_talk("Six.")
        self.assertEqual(prompt_tokens(), plain)
        self.all("#talks .open")[1].click()
        self.wait(lambda: self.texts(".said") == ["Two."])
        self.find("#open-settings").click()
        self.assertEqual(self.find("[name=system]").get_attribute("value"), "")     # cleared for that talk
        self.find("#close-settings").click()
        # What is no number is not taken.
        self.find("#open-settings").click()
        self.find("[name=temperature]").send_keys("-1")
        self.find("#settings-form .primary").click()
        self.assertTrue(self.find("#settings").is_displayed())
        self.find("[name=temperature]").clear()
        self.find("[name=tools]").send_keys("{}")
        self.find("#settings-form .primary").click()
        self.assertIn("a list was expected", self.find("#settings-error").text)
        self.assertTrue(self.script("""return document.getElementById('settings-error').getBoundingClientRect().bottom <=
            document.querySelector('.fields').getBoundingClientRect().bottom"""))


class KeyTest(PageTest):
    arguments = ("--ctx", "4096", "--api-key", "right")

    def is_expected(self, message):
        return "401" in message        # the browser's own line

    def test_the_key_is_asked_for_where_the_server_wants_one(self):
        self.assertTrue(self.find("#key-form").is_displayed())
        self.find("#key").send_keys("wrong", self.keys.ENTER)
        self.wait(lambda: "not know this key" in self.find("#key-error").text)
        self.find("#key").clear()
        self.find("#key").send_keys("right", self.keys.ENTER)
        self.wait(lambda: not self.find("#key-form").is_displayed())
        self.say("How?")
        self.reload()
        self.say("Well.")
        self.assertEqual(self.replies()[-1], SCRIPTS[""])


class FullTest(PageTest):
    arguments = ("--ctx", "128",)

    def is_expected(self, message):
        return "400" in message or "ERR_" in message or "503" in message

    def test_a_full_context_has_a_way_on(self):
        self.say("This one has a few words. " * 2)
        self.say("And this has some more of them. " * 2)
        self.assertIn("context", self.texts(".note.bad")[-1])
        self.find(".note button").click()                 # leaves the oldest out
        self.wait(lambda: self.replies()[-1] == SCRIPTS[""] and not self.is_running())
        self.assertEqual(len(self.all(".message.left-out")), 2)
        self.reload()
        self.assertEqual(len(self.all(".message.left-out")), 2)
        self.find("#new-talk").click()
        self.wait(lambda: not self.texts(".message"))
        self.say("Go!")
        self.assertIn("context of 128 tokens is full", self.texts(".note")[-1])
        self.assertEqual(self.texts(".note button"), ["New talk"])     # one message alone: there is none to be left out

    def test_a_server_that_is_gone(self):
        self.say("How?")
        self.server.process.terminate()
        self.server.process.wait(30)
        self.say("Well.")
        self.assertIn("does not answer", self.texts(".note.bad")[-1])
        self.assertEqual(self.texts(".message.assistant .actions button")[-1], "Try again")


def start_browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)


def main():
    global beryl, browser, models
    if os.environ.get("BERYL_PAGE_PYTHON") is None:
        if not shutil.which("chromium") or not shutil.which("chromedriver"):
            print("page_test.py: no chromium with chromedriver here")
            sys.exit(SKIPPED)
        python = prepare_test_data.python_environment(ROOT / "tests" / "page_requirements.txt", "page-test-python")
        if python is None:
            print("page_test.py: selenium can not be had")
            sys.exit(SKIPPED)
        os.execve(python, [str(python), *sys.argv], os.environ | {"BERYL_PAGE_PYTHON": "1"})
    beryl = Program(sys.argv.pop(1))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="beryl-page-"))
    models = folder
    make_scripted_model(folder / "scripted", SCRIPTS)
    with Server(beryl, folder / "scripted", "--device", "cpu") as server:
        if server.request("GET", "/")[0] == 404:
            print("page_test.py: this beryl was built without its page")
            sys.exit(SKIPPED)
    browser = start_browser()
    try:
        result = unittest.main(verbosity=2, exit=False).result
        failed = [test for test, _ in result.failures + result.errors]
        # A browser on a busy machine loses a moment now and then: what failed has to pass by itself.
        if failed and all(isinstance(test, unittest.TestCase) for test in failed):
            print(f"page_test.py: once more, by itself: {', '.join(test.id() for test in failed)}", flush=True)
            result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(type(test)(test._testMethodName) for test in failed))
    finally:
        browser.quit()
        shutil.rmtree(folder)
    sys.exit(0 if result.wasSuccessful() else 1)


if __name__ == "__main__":
    main()
