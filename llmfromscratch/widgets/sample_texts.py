"""Short texts to count tokens over: one meaning in ten languages, and other things that models read and write."""

from __future__ import annotations

# The same three sentences in each; where a language has several ways to say it, the plainest.
LANGUAGES: dict[str, str] = {
    "English": (
        "The library opens at nine in the morning. Whoever returns a book before Friday pays nothing; after that, "
        "every day costs a small fee. Children may read here without a card."
    ),
    "German": (
        "Die Bibliothek öffnet um neun Uhr morgens. Wer ein Buch vor Freitag zurückgibt, zahlt nichts; danach kostet "
        "jeder Tag eine kleine Gebühr. Kinder dürfen hier ohne Ausweis lesen."
    ),
    "French": (
        "La bibliothèque ouvre à neuf heures du matin. Celui qui rend un livre avant vendredi ne paie rien ; ensuite, "
        "chaque jour coûte une petite somme. Les enfants peuvent lire ici sans carte."
    ),
    "Greek": (
        "Η βιβλιοθήκη ανοίγει στις εννέα το πρωί. Όποιος επιστρέφει ένα βιβλίο πριν από την Παρασκευή δεν πληρώνει "
        "τίποτα· μετά, κάθε μέρα κοστίζει ένα μικρό ποσό. Τα παιδιά μπορούν να διαβάζουν εδώ χωρίς κάρτα."
    ),
    "Russian": (
        "Библиотека открывается в девять утра. Кто вернёт книгу до пятницы, ничего не платит; потом каждый день стоит "
        "небольших денег. Дети могут читать здесь без билета."
    ),
    "Arabic": (
        "تفتح المكتبة في التاسعة صباحا. من يعيد كتابا قبل يوم الجمعة لا يدفع شيئا، وبعد ذلك يكلف كل يوم رسما صغيرا. "
        "يمكن للأطفال أن يقرؤوا هنا بلا بطاقة."
    ),
    "Hindi": (
        "पुस्तकालय सुबह नौ बजे खुलता है। जो शुक्रवार से पहले किताब लौटाता है, वह कुछ नहीं देता; उसके बाद हर दिन का थोड़ा शुल्क लगता है। "
        "बच्चे यहाँ बिना कार्ड के पढ़ सकते हैं।"
    ),
    "Chinese": (
        "图书馆早上九点开门。星期五之前还书的人不用付钱；之后每天要付一点费用。孩子们可以在这里看书，不需要借书证。"
    ),
    "Japanese": (
        "図書館は朝の九時に開きます。金曜日より前に本を返す人は何も払いません。その後は一日ごとに少しの料金がかかります。"
        "子どもはカードなしでここで読めます。"
    ),
    "Korean": (
        "도서관은 아침 아홉 시에 문을 엽니다. 금요일 전에 책을 돌려주는 사람은 돈을 내지 않고, "
        "그 뒤에는 하루마다 적은 요금을 냅니다. "
        "아이들은 카드 없이 여기서 읽을 수 있습니다."
    ),
}

CONTENT: dict[str, str] = {
    "emoji": "👍🏽 👩\u200d🚀 🎉🎂🎈 😀😂🥲 🏳️\u200d🌈 👨\u200d👩\u200d👧\u200d👦 ❤️🔥 🇬🇷🇯🇵🇰🇷 ✍🏿 🦆",
    "Python code": (
        "def mean(values: list[float]) -> float:\n"
        '    """The arithmetic mean; raises ValueError for an empty list."""\n'
        "    if not values:\n"
        '        raise ValueError("there is no mean of nothing")\n'
        "    return sum(values) / len(values)\n"
    ),
    "JSON": (
        '{"orders": [{"id": 1042, "paid": true, "items": ["tea", "bread"], "total": 7.35},\n'
        '            {"id": 1043, "paid": false, "items": [], "total": null}], "next_page": "/orders?page=2"}\n'
    ),
    "digits": "3.14159265358979323846 1,048,576 0x7FFF 2024-02-29 18:45:07 +49 30 901820 65537 999999999",
    "white space": (
        "item      price\n----      -----\ntea        2.50\n\n\n\tbread\t\t 4.85\n"
        "                 \n  total    7.35   \n"
    ),
}
