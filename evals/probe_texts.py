"""The probe corpus of `assay fingerprint`: texts and chats that distinguish tokenizers and chat templates.

Each text is short and tests one thing that tokenizers do differently: splitting digits, keeping spaces, normalising Unicode,
recognising special tokens in plain text. Names are stable and texts never change, because a changed text would look like a changed
tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXTS: Mapping[str, str] = {
    "english": "The capital of France is Paris, isn't it? It's 5 o'clock.",
    "german": "Größere Maßstäbe überzeugen Köln.",
    "french": "L'été où l'œuvre naïve déçoit.",
    "vietnamese": "Tôi muốn học tiếng Việt ngay hôm nay.",
    "russian": "Съешь ещё этих мягких булок.",
    "greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "arabic": "السلام عليكم ورحمة الله ١٢٣",
    "hebrew": "שָׁלוֹם עולם",
    "hindi": "नमस्ते दुनिया, आप कैसे हैं?",
    "thai": "สวัสดีชาวโลก",
    "chinese": "人工智能正在改变世界。",
    "japanese": "東京は日本の首都です。カタカナ",
    "korean": "안녕하세요 세계",
    "emoji": "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☃️",
    "composed": "café cafe\u0301 ﬁ \u212b Å",
    "control": "a\u0000b\u200bc\ufeffd",
    "numbers": "7 42 365 2026 31415 1234567890 3.14159 1,000,000 -0.5e-10 0x1F 1/2",
    "words with digits": "gsm8k h100 v0.5.23 2nd 100% $5",
    "spaces": "a  b   c        d",
    "leading space": " leading",
    "trailing space": "trailing ",
    "newlines": "one\ntwo\n\nthree\r\nfour\n\n\n\n",
    "tabs": "\tif x:\n\t\treturn\t1",
    "python": 'def f(x: int) -> str:\n    """Doc."""\n    return f"{x!r:>4}"  # done\n',
    "c": "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; } // end",
    "json": '{"key": [1, 2.5, null, true], "nested": {"a\\"b": "\\u00e9"}}',
    "html": '<div class="x">A &amp; B</div><br/>',
    "markdown": "# Title\n\n- **bold** `code`\n\n| a | b |\n|--|--|\n",
    "latex": "$\\frac{a}{b} \\leq \\sum_{i=1}^{n} x_i^2$",
    "url": "https://example.org/a_b?q=1&r=%20#top",
    "camel case": "getHTTPResponseCode XMLParser snake_case kebab-case",
    "contractions": "I'll we've they're I'LL WE'VE don’t",
    "repeated": "aaaaaaaaaaaaaaaa ========== ----------",
    "special in text": "<s> </s> <|endoftext|> <|im_start|>user <|eot_id|> [INST] <bos> <pad>",
    "empty": "",
}
"""The texts, by name."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CHATS: Mapping[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "user": ([{"role": "user", "content": "Hello! What is 2+2?"}], []),
    "system": (
        [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name a colour.\n"}],
        [],
    ),
    "turns": (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": " Hello. "},
            {"role": "user", "content": "Bye"},
        ],
        [],
    ),
    "tools": ([{"role": "user", "content": "Weather in Paris?"}], [_TOOL]),
    "tool answer": (
        [
            {"role": "user", "content": "Weather in Paris?"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "blue"}'},
        ],
        [_TOOL],
    ),
}
"""The chats, by name: messages and tools."""
