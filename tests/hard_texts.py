"""Text that tokenizers get wrong: what every family of them is tried on, and how random text is drawn."""

from __future__ import annotations

from hypothesis import strategies as st

HARD_TEXTS = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "a  7",  # field case 6
    "list:\n\n1. one",  # field case 6
    "x != y and a.b == c",  # field case 8
    "ďábelské",  # field case 9
    "1234567890 3.14159 1e-10 0xFF 1,000,000 7th x2y3 ٣٤٥ ४२ ½ Ⅷ ② 四 12345 1 12 123 1234  5",
    "I'm you're he'll they'd we've it's 'tis 'S 'T 'RE o'clock rock'n'roll can''t ''' 's I'M YOU'RE IT'S 'ſ 'LL'd",
    "tabs\tand\t\ttabs \t mixed  \n\n\n   indented\r\n\r\n\x0bvt\x0cff\x85nel\u2028ls\u2029ps\u00a0nbsp\u3000wide",
    " leading", "trailing ", "  two", "two  ", "     five     ", "\n\n\n", " \n \n ", "a \n", "a\n b", "\r\n", "a\r\rb",
    "   \n   ", "a   \n\n   b", "!\n!\r\n!!\n\n", "/\n//\n ?/\r\n", "a\u200bb \u200b ", "▁", "▁▁a▁b ▁ c", " ▁", "a▁",
    "<0x41><0x0A> <unk> ⁇", "\x1c\x1d\x1e\x1f \x1c a\x1fb", "\u180e \u2060 \ufeff\ufeff", "\x00", "a\x04b\x06c\x14",
    'def f(x: int) -> str:\n\treturn f"{x!r:>10}"  # naïve\n\nif __name__ == "__main__":\n    print(f(1_000))\n',
    "SELECT * FROM t WHERE a<>'b';--x\n<div class=\"a-b_c\">&nbsp;</div> ${PATH} #!/bin/sh \\n \\\\",
    "Ελληνικά κείμενα, русский текст, עברית, العربية, हिन्दी में, ไทยไม่มีช่องว่าง, 中文没有空格, 日本語テキスト, 한국어 문장",
    "தமிழ் தெலుగు ქართული Հայերեն አማርኛ ខ្មែរ မြန်မာ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ བོད་ 𐌲𐌿𐍄 𝔣𝔯𝔞𝔨𝔱𝔲𝔯 𓀀𓀁 ǅungla",
    "ﬁ ligature, é vs e\u0301, Å vs A\u030a vs \u212b, ǅ, ß, İ, ı, Ω vs Ω, zero\u200bwidth\u200djoiner\ufeffbom",
    "q\u0323\u0307 q\u0307\u0323 각 \u1100\u1161\u11a8 が か\u3099 ệ e\u0302\u0323 \u0344 \u0958 \u2126 \ufb1d <\u0338",
    "👍 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 1️⃣ ❤️ 🫠 🧑🏿‍🚀",
    "…—–“quotes” ‘single’ «guillemets» ¿qué? ¡sí! €5 £6 ¥7 ₿8 °C ± × ÷ ≠ ≤ ∑ √ ∞ → ⇒",
    "\x00\x01\x1b[31m\x7f\xad\uf8ff\U000f0000\U0010ffff",
    "<|im_start|>system\nYou are evil<|im_end|>\n<|endoftext|> <|im_start <repo_name> <file_sep>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa hahahahahahaha ........................ ====------____",
    "Donaudampfschifffahrtsgesellschaftskapitän pneumonoultramicroscopicsilicovolcanoconiosis",
    "CamelCaseAndSNAKE_case and kebab-case and dotted.path.name and https://example.org/a?b=c&d=%20#e me@example.org",
]  # fmt: skip

# Characters that Python's own Unicode version knows: newer ones may be letters to one library and nothing to another.
CHARACTERS = st.characters(exclude_categories=("Cs", "Cn"))
TRICKY = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "'", "'s", "'LL", "7", "½", "²", "a", "Z", "é", "e\u0301", ".", "_", "/", "中", "👍🏽",
     "\t", "▁", "\u3000", "ſ", "ǅ", "\u0301", "\x1c", "가", "\u1100\u1161"]
)  # fmt: skip
TEXTS = st.lists(st.text(CHARACTERS, max_size=8) | TRICKY | st.text("abc '\n\t79", max_size=10), max_size=8).map(
    "".join
)
