#!/usr/bin/env python3
"""beryl chat as a person has it: on a pseudo-terminal, key by key, and with what is piped in. The model's replies are known.

    chat_test.py BERYL [UNITTEST OPTIONS]

What the program has understood is read from what /save writes.
"""
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import sys
import tempfile
import termios
import unittest

from cli_support import Program, Terminal, wait_until
from scripted_model import Loop, make_scripted_model

beryl = None
models = None
UP, LEFT, HOME, END, DELETE = b"\x1b[A", b"\x1b[D", b"\x1b[H", b"\x1b[F", b"\x1b[3~"
ALT_ENTER = b"\x1b\r"
READY = b"\x1b[?2004h"          # the program has begun to read a line
DEFAULT = "I have nothing special to say about that."
SCRIPTS = {
    "": DEFAULT,
    "?": "Paris, as far as I know.",
    "!": Loop("on and on it goes, "),
    "t": "<think>First I think about it.</think>Then I speak.",
}


class ChatCase(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="beryl-chat-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def chat(self, *arguments, environment=None):
        home = {"HOME": str(self.folder), "XDG_STATE_HOME": "", "LC_ALL": "C", "NO_COLOR": "1"}
        terminal = Terminal(beryl, "chat", models / "scripted", "--device", "cpu", *arguments, environment=home | (environment or {}))
        self.enterContext(terminal)
        self.first = self.read(terminal)
        return terminal

    @staticmethod
    def read(terminal):
        """What is shown until the next line can be typed, without the terminal's codes."""
        shown = terminal.read_until(READY)
        terminal.read_until(b"> ")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", shown.decode("utf-8"))

    def say(self, terminal, keys, end=b"\n"):
        """(what comes for a line that is typed, without the line as it is shown while it is typed)."""
        terminal.write((keys.encode() if isinstance(keys, str) else keys) + end)
        terminal.read_until(b"\x1b[?2004l")             # the line is done
        return self.read(terminal)

    def saved(self, terminal):
        path = self.folder / f"saved-{len(list(self.folder.glob('saved-*')))}.json"
        self.say(terminal, f"/save {path}")
        return json.loads(path.read_text())

    def said(self, terminal):
        """What the user has said, as the program understood it."""
        return [message["content"] for message in self.saved(terminal)["messages"] if message["role"] == "user"]

    def end(self, terminal, status=0):
        self.assertEqual(terminal.wait(), status)


class TalkTest(ChatCase):
    def test_replies_and_the_line_below_them(self):
        terminal = self.chat("--ctx", "1000")
        self.assertRegex(self.first, r"A chat with .*/help.*Ctrl-C")
        found = re.fullmatch(r"(?s)(.*)\ncontext (\d+) of 1000 \((\d+) %\) \| prompt (\d+) tokens, [\d.]+ tok/s \| reply (\d+) tokens, [\d.]+ tok/s\n",
                             self.say(terminal, "Where is that?"))
        self.assertEqual(found[1], SCRIPTS["?"])
        used, percent, n_prompt, n_reply = map(int, found.groups()[1:])
        self.assertEqual(used, n_prompt + n_reply + 1)                 # and the token that ended the reply
        self.assertEqual(percent, used // 10)
        self.say(terminal, "Well.")
        self.assertEqual([message["content"] for message in self.saved(terminal)["messages"]], ["Where is that?", SCRIPTS["?"], "Well.", DEFAULT])
        terminal.write(b"\x04")
        self.end(terminal)

    def test_thoughts_are_dim_and_no_part_of_the_talk(self):
        terminal = self.chat(environment={"NO_COLOR": ""})
        terminal.write(b"Do that\n")
        shown = terminal.read_until(READY).replace(b"\r", b"")
        thought = re.search(rb"((?:\x1b\[2m[^\x1b]*\x1b\[0m)+)Then I speak\.\n\x1b\[2mcontext ", shown)
        self.assertTrue(thought, shown)
        self.assertEqual(re.sub(rb"\x1b\[[02]m", b"", thought[1]), b"First I think about it.\n")
        terminal.read_until(b"> ")
        self.assertEqual(self.saved(terminal)["messages"][1]["content"], "Then I speak.")

    def test_ctrl_c_ends_a_reply_and_keeps_the_talk(self):
        terminal = self.chat("--ctx", "100000")
        self.say(terminal, "Where?")
        terminal.write(b"Go!\n")
        terminal.read_until(b"on and on it goes")
        terminal.interrupt()
        self.assertRegex(self.read(terminal), r"\| stopped\n\Z")
        first, second = self.saved(terminal)["messages"][1::2]
        self.assertEqual(first["content"], SCRIPTS["?"])
        self.assertTrue(second["content"].startswith("on and on it goes"))
        # The next one knows of it: what was read of the talk is not read again.
        self.assertIn(DEFAULT, self.say(terminal, "Well."))
        self.assertEqual(self.said(terminal), ["Where?", "Go!", "Well."])

    def test_ctrl_c_while_a_message_is_read(self):
        # Two tokens a chunk, 60,000 of them: it is stopped long before its end.
        talk = {"beryl_talk": 1, "model": "m", "system": "", "settings": {}, "messages": [
            {"role": "user", "content": "word " * 12000}, {"role": "assistant", "content": "Yes."}]}
        (self.folder / "long.json").write_text(json.dumps(talk))
        terminal = self.chat("--ctx", "100000", "--chunk", "2", environment={"NO_COLOR": ""})
        self.say(terminal, f"/load {self.folder}/long.json")
        terminal.write(b"Where?\n")
        terminal.read_until(b"reading, ")                               # on a terminal one sees how far it is
        terminal.interrupt()
        shown = self.read(terminal)
        n_read = int(re.search(r"stopped after (\d+) tokens of the message", shown)[1])
        self.assertLess(n_read, 60000)
        self.assertEqual(self.saved(terminal)["messages"], talk["messages"])
        self.say(terminal, "/reset")
        self.assertIn(SCRIPTS["?"], self.say(terminal, "Where?"))

    def test_ctrl_c_and_ctrl_d_at_the_prompt(self):
        terminal = self.chat()
        for key in (b"\x03", None):                                    # the key, and the signal
            terminal.write(b"half a li")
            terminal.read_until(b"half a li")
            terminal.write(key) if key else terminal.interrupt()
            self.assertIn("Ctrl-C once more", self.read(terminal))
            self.say(terminal, "Well.")
        self.assertEqual(self.said(terminal), ["Well.", "Well."])
        terminal.interrupt()
        self.read(terminal)
        terminal.interrupt()
        self.end(terminal, 130)
        terminal = self.chat()
        terminal.write(b"\x04")
        self.end(terminal)

    def test_a_full_context_has_a_way_on(self):
        terminal = self.chat("--ctx", "160")
        self.say(terminal, "This is a message of some length: one, two, three.")
        self.assertRegex(self.say(terminal, "And this is another one that does not fit any more, for sure."),
                         r"beryl: [^\n]*more than the context of 160 [^\n]*/forget[^\n]*/reset[^\n]*\n\Z")
        self.assertIn("The talk is empty.", self.say(terminal, "/forget"))
        self.assertIn(DEFAULT, self.say(terminal, "And this is another one that does fit now, for sure."))
        self.say(terminal, "/reset")
        shown = self.say(terminal, "Go!")                               # a reply that meets the end
        self.assertRegex(shown, r"context 160 of 160 \(100 %\)")
        self.assertRegex(shown, r"beryl: warning: the context of 160 positions is full[^\n]*/forget")
        self.assertRegex(self.say(terminal, "More"), r"beryl: [^\n]*more than the context of 160")
        self.say(terminal, "/undo")
        self.assertIn(SCRIPTS["?"], self.say(terminal, "Where?"))
        self.assertEqual(self.said(terminal), ["Where?"])


    def test_what_no_forgetting_makes_room_for_is_said(self):
        terminal = self.chat("--ctx", "160")
        long = "This message is longer than all the context that there is. " * 4
        for before in ("", "Where?"):                                   # in an empty talk, and in one
            if before:
                self.say(terminal, before)
            shown = self.say(terminal, long)
            self.assertRegex(shown, r"\Aberyl: this message alone takes \d+ positions, more than the context of 160, [^\n]*--ctx\)\n\Z")
            self.assertNotIn("/forget", shown)
        self.say(terminal, "/reset")
        self.say(terminal, "/system " + "Be brief. " * 11)
        shown = self.say(terminal, "This message would fit into the context, alone.")
        self.assertRegex(shown, r"\Aberyl: this message and what the model is told [^\n]*context of 160, [^\n]*/system off[^\n]*--ctx\)\n\Z")
        self.say(terminal, "/system off")
        self.assertIn(DEFAULT, self.say(terminal, "This message would fit into the context, alone."))


class CommandTest(ChatCase):
    def test_help_names_every_command(self):
        terminal = self.chat()
        shown = self.say(terminal, "/help")
        for command in ("/help", "/reset", "/system", "/save", "/load", "/set", "/retry", "/undo", "/forget", "/exit"):
            self.assertRegex(shown, rf"(?m)^  {command}\b")
        self.assertIn("Alt-Enter", shown)
        terminal.write(b"/exit\n")
        self.end(terminal)

    def test_what_is_wrong_is_one_line_and_changes_nothing(self):
        terminal = self.chat()
        self.say(terminal, "Where?")
        before = self.saved(terminal)
        for command, part in (("/fly", "there is no command '/fly'"), ("/reset now", "takes nothing"), ("/save", "name of a file"),
                              ("/load", "name of a file"), ("/load /nowhere", "no such file"), ("/load .", "cannot read"), ("/set temp", "/set temp has no value, a number from 0 to 100 was expected; it is 0.7 now"),
                              ("/set seed ", "random, was expected; it is random now"), ("/set colour", "no setting 'colour'; there are temp, "), ("/set temp=1", "no setting 'temp=1'"),
                              ("/set temp hot", "temp is 'hot', a number from 0 to 100 was expected"), ("/set temp -1", "from 0 to 100"),
                              ("/set temp nan", "from 0 to 100"), ("/set top-k 1.5", "whole number"), ("/set seed -3", "random"),
                              ("/set tokens 0", "or all"), ("/set think maybe", "on or off"), ("/set colour red", "no setting 'colour'"),
                              ("/forget 2", "from 1 to 1"), ("/forget x", "from 1 to 1"), ("/save /nowhere/x", "/nowhere/x")):
            with self.subTest(command=command):
                shown = self.say(terminal, command)
                self.assertTrue(shown.startswith("beryl: ") and shown.count("\n") == 1, shown)
                self.assertIn(part, shown)
        self.assertEqual(self.saved(terminal), before)

    def test_set_changes_replies(self):
        terminal = self.chat("--temp", "0.25")
        self.assertRegex(self.say(terminal, "/set"), r"(?m)^  temp +0\.25 [\s\S]*^  seed +random [\s\S]*^  tokens +all [\s\S]*^  think +off ")
        self.say(terminal, "/set tokens 2")
        self.say(terminal, "/set temp 0")
        self.say(terminal, "/set seed 7")
        self.assertRegex(self.say(terminal, "Where?"), r"\AParis, as\n[^\n]*reply 2 tokens[^\n]*/set tokens\)\n\Z")
        self.say(terminal, "/set tokens all")
        self.assertIn(SCRIPTS["?"], self.say(terminal, "/retry"))
        self.assertIn("has no thinking", self.say(terminal, "/set think on"))
        self.assertEqual(self.saved(terminal)["settings"], {"temp": 0.0, "top-k": 40, "top-p": 0.95, "min-p": 0.0, "repeat-penalty": 1.0, "presence-penalty": 0.0,
                                                            "frequency-penalty": 0.0, "seed": 7, "think": True})

    def test_system_reset_undo_retry_forget(self):
        terminal = self.chat("--system", "Be kind.")
        self.assertIn("Be kind.", self.say(terminal, "/system"))
        plain = int(re.search(r"prompt (\d+)", self.say(terminal, "One."))[1])
        self.say(terminal, "/reset")
        self.say(terminal, "/system off")
        self.assertEqual(plain - int(re.search(r"prompt (\d+)", self.say(terminal, "One."))[1]), 1 + len("system\nBe kind.") + 1 + 1)
        self.say(terminal, '/system """\nTwo\nlines."""')
        self.say(terminal, "Two.")
        self.say(terminal, "Where?")
        saved = self.saved(terminal)
        self.assertEqual((saved["system"], [message["content"] for message in saved["messages"][::2]]), ("Two\nlines.", ["One.", "Two.", "Where?"]))
        self.assertIn("2 messages", self.say(terminal, "/undo"))
        self.assertIn("1 message and", self.say(terminal, "/forget"))
        self.assertEqual(self.said(terminal), ["Two."])
        self.assertIn(DEFAULT, self.say(terminal, "/retry"))
        self.assertEqual(self.said(terminal), ["Two."])
        self.say(terminal, "//usr is a folder.")
        self.assertEqual(self.said(terminal), ["Two.", "/usr is a folder."])

    def test_save_and_load(self):
        path = self.folder / "talk.json"
        terminal = self.chat("--system", "Sé breve 😀.", "--seed", "3", "-n", "100")
        self.say(terminal, "Where <|im_end|> \"is\" it?")
        self.say(terminal, "/save ~/talk.json")
        saved = json.loads(path.read_text())
        self.assertEqual(saved["messages"], [{"role": "user", "content": "Where <|im_end|> \"is\" it?"}, {"role": "assistant", "content": SCRIPTS["?"]}])
        again = self.chat()
        self.assertIn("1 message and", self.say(again, "/load ~/talk.json"))
        self.assertEqual(self.saved(again), saved)
        self.say(again, "Well.")
        self.say(again, "/save ~/talk.json")                            # over the old one
        self.assertEqual(len(json.loads(path.read_text())["messages"]), 4)
        # Thoughts are kept, and the model is not told them again: its prompt is as long as without.
        self.say(again, "Think about it")
        saved = self.saved(again)
        self.assertEqual(saved["messages"][-1], {"role": "assistant", "content": "Then I speak.", "reasoning_content": "First I think about it."})
        lengths = []
        for thought in (True, False):
            if not thought:
                saved["messages"][-1].pop("reasoning_content")
            (self.folder / "thought.json").write_text(json.dumps(saved))
            self.assertIn("3 messages and", self.say(again, "/load ~/thought.json"))
            self.assertEqual(self.saved(again), saved)
            lengths.append(re.search(r"context (\d+) of", self.say(again, "Well."))[1])
        self.assertEqual(lengths[0], lengths[1])
        # What is no talk is neither read nor written over.
        (self.folder / "notes.txt").write_text("mine")
        self.assertIn("is no saved talk", self.say(again, "/save ~/notes.txt"))
        self.assertEqual((self.folder / "notes.txt").read_text(), "mine")
        for text in ("mine", "{}", "[1]", '{"beryl_talk": 2}', json.dumps(saved | {"messages": saved["messages"][:1]}), json.dumps(saved | {"messages": 5}),
                     json.dumps(saved | {"messages": [{"role": "assistant", "content": "x"}] * 2}), json.dumps(saved | {"system": None}),
                     json.dumps(saved | {"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "x"}]}),
                     json.dumps(saved | {"messages": [{"role": ["user"], "content": "x"}, {"role": "assistant", "content": "x"}]}),
                     json.dumps(saved | {"messages": [{"role": "user", "content": "x", "reasoning_content": "x"}, {"role": "assistant", "content": "x"}]}),
                     json.dumps(saved | {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", "reasoning_content": 1}]}),
                     json.dumps(saved | {"settings": {"temp": "hot"}}), json.dumps(saved | {"settings": {"temp": 1, "colour": 1}}), json.dumps(saved)[:-9],
                     "[" * 100000, json.dumps(saved).replace("Paris", "\udcff").encode("utf-8", "surrogateescape").decode("latin-1")):
            (self.folder / "bad.json").write_text(text, encoding="utf-8")
            shown = self.say(again, "/load ~/bad.json")
            if "\xff" not in text:
                self.assertTrue(shown.startswith("beryl: ") and shown.count("\n") == 1 and "bad.json" in shown, (text[:80], shown))
        again.write(b"\x04")
        self.end(again)


class EditTest(ChatCase):
    def test_a_line_is_edited_as_it_is_typed(self):
        terminal = self.chat()
        for keys, text in ((b"Helo." + LEFT * 2 + b"l", "Hello."), (b"ello." + HOME + b"H" + END + b".", "Hello.."), (b"Hallo." + LEFT * 5 + DELETE + b"e", "Hello."),
                           ("Né😀x".encode() + b"\x7f\x7f.", "Né."), (b"wrong\x15right.", "right."), (b"one two\x17three.", "one three."),
                           ("日本語é".encode() + LEFT * 2 + b"|" + END + b".", "日本|語é."), (b"\xff\xfe.", "\ufffd\ufffd.")):
            with self.subTest(text=text):
                self.say(terminal, keys)
                self.assertEqual(self.said(terminal)[-1], text)

    def test_history_within_and_between_chats(self):
        terminal = self.chat()
        for text in ("First.", "Second one.", "Third."):
            self.say(terminal, text)
        self.say(terminal, UP * 3)
        self.say(terminal, b"\x12econd")                                # Ctrl-R looks back; Enter takes what is found
        self.assertEqual(self.said(terminal), ["First.", "Second one.", "Third.", "First.", "Second one."])
        terminal.write(b"\x04")
        self.end(terminal)
        path = self.folder / ".local/state/beryl/chat_history"
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        again = self.chat()
        self.say(again, UP * 2)                                         # before it: /save
        self.assertEqual(self.said(again), ["Second one."])
        secret = self.chat("--no-history")
        self.say(secret, UP + b"A secret.")
        self.assertEqual(self.said(secret), ["A secret."])
        self.assertNotIn("secret", path.read_text())

    def test_messages_of_many_lines(self):
        terminal = self.chat()
        for keys, text in ((b"One\\\ntwo\\\nthree.", "One\ntwo\nthree."), (b'"""One\n\n  /two\n"""', "One\n\n  /two"), (b'"""one line."""', "one line."),
                           (b"Alt" + ALT_ENTER + b"Enter.", "Alt\nEnter."),
                           (b"Pasted: \x1b[200~def f():\r\treturn 1\r/reset\n\x1b[31m\x1b[201~ end.", "Pasted: def f():\n  return 1\n/reset\n[31m end.")):
            with self.subTest(text=text):
                terminal.write(keys)
                self.say_until_answered(terminal)
                self.assertEqual(self.said(terminal)[-1], text)
        # Out of the history it comes as one again.
        self.say(terminal, UP * 2)
        self.assertEqual(self.said(terminal)[-1], "Pasted: def f():\n  return 1\n/reset\n[31m end.")

    @staticmethod
    def say_until_answered(terminal):
        terminal.write(b"\n")
        terminal.read_until(b"\ncontext ")
        terminal.read_until(READY)
        terminal.read_until(b"> ")

    def test_ctrl_c_forgets_all_lines_of_a_message(self):
        terminal = self.chat()
        terminal.write(b'"""One\n')
        terminal.read_until(b". ")
        terminal.interrupt()
        self.read(terminal)
        self.say(terminal, "Well.")
        self.assertEqual(self.said(terminal), ["Well."])

    def test_tab_completes_commands(self):
        terminal = self.chat()
        self.say(terminal, b"/sy\tBe kind.")
        self.assertEqual(self.saved(terminal)["system"], "Be kind.")
        self.assertIn("temp", self.say(terminal, b"/s\te\t"))           # /save, /set and /system: only Tab after e tells
        self.say(terminal, b"a\tb.")
        self.assertEqual(self.said(terminal), ["ab."])

    def test_another_size_of_the_window(self):
        terminal = self.chat()
        for width in (20, 100):
            terminal.write(b"some words that fill more than a narrow window has, ")
            terminal.read_until(b"has, ")
            fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
            os.kill(terminal.pid, signal.SIGWINCH)
            self.say(terminal, "and more.")
        self.assertEqual(self.said(terminal), ["some words that fill more than a narrow window has, and more."] * 2)

    def test_stopped_and_continued_with_another_use_of_the_terminal(self):
        terminal = self.chat()
        cooked = termios.tcgetattr(terminal.fd)
        cooked[3] |= termios.ICANON
        terminal.write(b"Halo")
        terminal.read_until(b"Halo")
        os.kill(terminal.pid, signal.SIGSTOP)
        wait_until(lambda: pathlib.Path(f"/proc/{terminal.pid}/stat").read_text().split()[2] == "T")
        termios.tcsetattr(terminal.fd, termios.TCSANOW, cooked)         # as a shell does
        os.kill(terminal.pid, signal.SIGCONT)
        wait_until(lambda: not termios.tcgetattr(terminal.fd)[3] & termios.ICANON)
        self.say(terminal, LEFT + b"l" + END + b".")
        self.assertEqual(self.said(terminal), ["Hallo."])

    def test_the_terminal_is_left_as_it_was(self):
        terminal = self.chat()
        self.say(terminal, "Well.")
        terminal.write(b"Go!\n")
        terminal.read_until(b"on and on")
        self.assertTrue(termios.tcgetattr(terminal.fd)[3] & termios.ICANON)   # while a reply comes, keys are the terminal's
        terminal.interrupt()
        self.read(terminal)
        terminal.write(b"\x04")
        terminal.read_until(b"\x1b[?2004l")
        self.end(terminal)


class EndTest(ChatCase):
    def test_a_signal_that_ends_the_program_leaves_the_terminal_as_it_was(self):
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            with self.subTest(signal=number):
                with Terminal(beryl, "chat", models / "scripted", "--device", "cpu", environment={"HOME": str(self.folder), "XDG_STATE_HOME": "", "LC_ALL": "C"}) as terminal:
                    self.read(terminal)
                    self.assertFalse(termios.tcgetattr(terminal.fd)[3] & termios.ICANON)
                    terminal.write(b"half a li")
                    os.kill(terminal.pid, number)
                    self.assertEqual(terminal.wait(), -number)
                    self.assertTrue(termios.tcgetattr(terminal.fd)[3] & termios.ICANON)

    def test_the_key_that_quits_does_not_lose_the_talk(self):
        terminal = self.chat()
        self.say(terminal, "How are you?")
        terminal.write(b"\x1c")
        self.say(terminal, "And now?")
        self.assertEqual(self.said(terminal), ["How are you?", "And now?"])


class PipedTest(ChatCase):
    def run_chat(self, text, *arguments):
        return beryl("chat", models / "scripted", "--device", "cpu", *arguments, stdin=text.encode())

    def test_each_line_is_a_message_or_a_command(self):
        path = self.folder / "talk.json"
        result = self.run_chat(f'Where?\r\n\n/set tokens 3\n"""Two\nlines."""\nOne \\\nmore.\n/save {path}\nAnd the end')
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.decode().splitlines()
        self.assertEqual(lines[0], SCRIPTS["?"])
        self.assertEqual(len(lines), 4)
        self.assertTrue(all(DEFAULT.startswith(line) and DEFAULT != line != "" for line in lines[1:]), lines)
        self.assertEqual([message["content"] for message in json.loads(path.read_text())["messages"][::2]], ["Where?", "Two\nlines.", "One \nmore."])
        self.assertEqual(result.stderr.decode().count("\ncontext ") + result.stderr.decode().startswith("context "), 4)
        self.assertNotIn("\x1b", (result.stdout + result.stderr).decode())
        self.assertFalse((self.folder / ".local").exists())             # no history of what nobody typed

    def test_the_first_that_fails_ends_it(self):
        for text, part in (("Where?\n/fly\nNever said.\n", "/fly"), ("/load /nowhere\nNever said.\n", "/nowhere"), ("x" * 500 + "\nNever said.\n", "context of 100")):
            result = self.run_chat(text, "--ctx", "100")
            self.assertEqual(result.returncode, 1)
            self.assertIn(part, result.stderr.decode().splitlines()[-1])
            self.assertNotIn(DEFAULT, result.stdout.decode())

    def test_input_without_an_end_and_output_without_room(self):
        with open("/dev/zero", "rb") as zeros:
            process = beryl.start("chat", models / "scripted", "--device", "cpu", stdin=zeros)
            _, stderr = process.communicate(timeout=60)
        self.assertEqual((process.returncode, stderr.count(b"\n")), (1, 1), stderr)
        self.assertIn(b"longer than", stderr)
        with open("/dev/full", "wb") as full:
            process = beryl.start("chat", models / "scripted", "--device", "cpu", stdin=-1, stdout=full)
            _, stderr = process.communicate(b"Where?\nNever said.\n", timeout=60)
        self.assertEqual((process.returncode, stderr.count(b"\n")), (1, 1), stderr)
        self.assertIn(b"standard output cannot be written", stderr)

    def test_nothing_at_all(self):
        self.assertEqual(self.run_chat("").returncode, 0)
        self.assertEqual(self.run_chat("/exit\nNever said.\n").stdout, b"")

    def test_ctrl_c(self):
        process = beryl.start("chat", models / "scripted", "--device", "cpu", "--ctx", "100000", stdin=-1)
        process.stdin.write(b"Go!\nNever said.\n")
        process.stdin.close()
        data = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdin = None
        rest, stderr = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, stderr)
        self.assertRegex(data + rest, rb"\Aon[^\n]*\n\Z")
        self.assertNotIn(DEFAULT.encode(), rest)


def main():
    global beryl, models
    beryl = Program(sys.argv.pop(1))
    models = pathlib.Path(tempfile.mkdtemp(prefix="beryl-chat-models-"))
    try:
        make_scripted_model(models / "scripted", SCRIPTS)
        unittest.main()
    finally:
        shutil.rmtree(models)


if __name__ == "__main__":
    main()
