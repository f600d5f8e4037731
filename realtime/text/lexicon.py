"""Tables of English: abbreviations, units, currencies, names of symbols."""

from __future__ import annotations

# After these a sentence goes on whatever follows. Keys are written without the last full stop.
ALWAYS_WITHIN = {
    "mr": "mister",
    "mrs": "missus",
    "ms": "miz",
    "dr": "doctor",
    "prof": "professor",
    "gen": "general",
    "sen": "senator",
    "rep": "representative",
    "gov": "governor",
    "lt": "lieutenant",
    "col": "colonel",
    "sgt": "sergeant",
    "capt": "captain",
    "cmdr": "commander",
    "rev": "reverend",
    "hon": "honorable",
    "mt": "mount",
    "fig": "figure",
    "vol": "volume",
    "e.g": "for example",
    "i.e": "that is",
    "vs": "versus",
    "cf": "compare",
    "ca": "circa",
    "approx": "approximately",
    "incl": "including",
}
# After these it ends if a capital follows.
MAYBE_LAST = {
    "etc": "et cetera",
    "al": "al",
    "jr": "junior",
    "sr": "senior",
    "inc": "incorporated",
    "ltd": "limited",
    "co": "company",
    "corp": "corporation",
    "dept": "department",
    "est": "established",
    "ave": "avenue",
    "blvd": "boulevard",
    "rd": "road",
    "mio": "million",
    "a.m": "a m",
    "p.m": "p m",
    "ph.d": "P H D",
    "jan": "January",
    "feb": "February",
    "mar": "March",
    "apr": "April",
    "aug": "August",
    "sept": "September",
    "sep": "September",
    "oct": "October",
    "nov": "November",
    "dec": "December",
}
# Before a number these are abbreviations; elsewhere the full stop ends a sentence.
NUMBERED = {
    **{"no": "number", "nos": "numbers", "p": "page", "pp": "pages", "ch": "chapter", "sec": "section"},
    **{"eq": "equation", "art": "article"},
}
# Written with a small letter these are ordinary words.
CAPITAL_ONLY = frozenset("gen rep gov col rev hon mt mar dec co rd ms sen nov".split())
# Titles that are also written without a full stop.
BARE_TITLES = {"Mr": "mister", "Mrs": "missus", "Ms": "miz", "Dr": "doctor", "Prof": "professor"}

SCALES = {
    "hundred": "hundred",
    "thousand": "thousand",
    "million": "million",
    "billion": "billion",
    "trillion": "trillion",
    "mio": "million",
    "mio.": "million",
    "mrd": "billion",
    "mrd.": "billion",
    "mn": "million",
    "bn": "billion",
}
ATTACHED_SCALES = {
    "k": "thousand",
    "K": "thousand",
    "m": "million",
    "M": "million",
    "b": "billion",
    "B": "billion",
}

DOLLAR = ("dollar", "dollars", "cent", "cents")
EURO = ("euro", "euros", "cent", "cents")
POUND = ("pound", "pounds", "penny", "pence")
YEN = ("yen", "yen", "", "")
SIGNS = {"$": DOLLAR, "€": EURO, "£": POUND, "¥": YEN, "¢": ("cent", "cents", "", "")}
CODES = {
    "USD": DOLLAR,
    "EUR": EURO,
    "GBP": POUND,
    "JPY": YEN,
    "CHF": ("Swiss franc", "Swiss francs", "", ""),
    "CAD": ("Canadian dollar", "Canadian dollars", "cent", "cents"),
    "AUD": ("Australian dollar", "Australian dollars", "cent", "cents"),
    "CNY": ("yuan", "yuan", "", ""),
    "INR": ("rupee", "rupees", "", ""),
}

# Capitals read letter by letter although they have a vowel; without one they always are.
SPELLED = frozenset(
    [*CODES, *"AI API CEO CIO CTO EU FAQ HIV IBM ID IP IPO IO ISO UI UK UN URL US USA USB VIP".split()]
)

# Units behind a number; the plural takes an s.
UNITS = {
    **{"km": "kilometer", "m": "meter", "cm": "centimeter", "mm": "millimeter", "μm": "micrometer"},
    **{"nm": "nanometer", "mi": "mile", "yd": "yard", "kg": "kilogram", "g": "gram", "mg": "milligram"},
    **{"lb": "pound", "lbs": "pound", "oz": "ounce", "l": "liter", "L": "liter", "ml": "milliliter"},
    **{"mL": "milliliter", "s": "second", "sec": "second", "ms": "millisecond", "μs": "microsecond"},
    **{"ns": "nanosecond", "min": "minute", "h": "hour", "hr": "hour", "hrs": "hour"},
    **{"kB": "kilobyte", "KB": "kilobyte", "MB": "megabyte", "GB": "gigabyte", "TB": "terabyte"},
    **{"PB": "petabyte", "KiB": "kibibyte", "MiB": "mebibyte", "GiB": "gibibyte", "W": "watt"},
    **{"kW": "kilowatt", "MW": "megawatt", "kWh": "kilowatt hour", "V": "volt", "mV": "millivolt"},
    **{"mA": "milliamp", "px": "pixel", "dB": "decibel", "°": "degree"},
}
FIXED_UNITS = {
    **{"%": "percent", "‰": "per mille", "Hz": "hertz", "kHz": "kilohertz", "MHz": "megahertz"},
    **{"GHz": "gigahertz", "mph": "miles per hour", "km/h": "kilometers per hour", "ft": "feet"},
    **{"m/s": "meters per second", "fps": "frames per second", "kbps": "kilobits per second"},
    **{"Mbps": "megabits per second", "°C": "degrees Celsius", "°F": "degrees Fahrenheit"},
}
HALVES = ("am", "pm", "AM", "PM", "a.m", "p.m", "A.M", "P.M", "a.m.", "p.m.", "A.M.", "P.M.")

# Symbols that are spoken wherever they stand.
SYMBOLS = {
    **{"&": "and", "@": "at", "+": "plus", "=": "equals", "/": "slash", "⁄": "slash", "%": "percent"},
    **{"×": "times", "÷": "divided by", "±": "plus or minus", "≈": "about", "≤": "at most", "√": "root"},
    **{"≥": "at least", "≠": "is not", "°": "degrees", "§": "section", "©": "copyright", "→": "to"},
    **{"№": "number", "²": "squared", "³": "cubed", "∞": "infinity", "\\": "backslash"},
    **{"€": "euros", "£": "pounds", "¥": "yen", "$": "dollars", "¢": "cents"},
    **{"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "θ": "theta", "λ": "lambda", "μ": "mu"},
    **{"π": "pi", "σ": "sigma", "ω": "omega", "Ω": "omega", "Δ": "delta"},
}
# Symbols that are markup: spoken only between numbers, or where markup is not cleaned.
MARKS = {
    **{"*": "times", "<": "less than", ">": "greater than", "#": "number", "~": "about", "^": "to the"},
}
RAW_MARKS = {
    **{"*": "asterisk", "<": "less than", ">": "greater than", "#": "hash", "~": "tilde", "^": "caret"},
    **{"_": "underscore", "`": "backtick", "|": "bar", "•": "bullet"},
}
URL_SYMBOLS = {
    **{".": "dot", "/": "slash", ":": "colon", "?": "question mark", "=": "equals", "&": "and", "-": "dash"},
    **{"_": "underscore", "#": "hash", "%": "percent", "@": "at", "+": "plus", "~": "tilde", "!": "bang"},
    **{"*": "star", "$": "dollar", ";": "semicolon", ",": "comma"},
}
