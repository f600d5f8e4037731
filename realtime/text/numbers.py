"""Numbers as English words. Digits come as strings, so no length of them is a problem."""

from __future__ import annotations

from functools import lru_cache

from num2words import num2words

MAX_DIGITS = 18  # longer runs are identifiers: read digit by digit

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_FRACTIONS = {2: "half", 4: "quarter"}


def singly(digits: str) -> str:
    return " ".join(DIGITS[int(digit)] for digit in digits)


@lru_cache(maxsize=4096)
def _words(value: int, form: str) -> str:
    return str(num2words(value, to=form)).replace(",", "")  # a comma would be spoken as a pause


def cardinal(digits: str) -> str:
    """`digits` as a count; digit by digit when it is long or starts with a zero."""
    if len(digits) > MAX_DIGITS or digits[0] == "0" and len(digits) > 1:
        return singly(digits)
    return _words(int(digits), "cardinal")


def ordinal(digits: str) -> str:
    if len(digits) > MAX_DIGITS:
        return singly(digits)
    return _words(int(digits), "ordinal")


def is_year(digits: str) -> bool:
    """Four digits from 1100 to 2099 that stand alone are read as a year."""
    return len(digits) == 4 and "1100" <= digits <= "2099"


def year(digits: str) -> str:
    return _words(int(digits), "year")


def decimal(number: str) -> str:
    """A number in any of the forms `12`, `1,204.50`, `3.14`, `.5`, `1,5`."""
    whole, fraction = split_decimal(number)
    spoken = cardinal(whole) if whole else ""
    return f"{spoken} point {singly(fraction)}".strip() if fraction else spoken


def split_decimal(number: str) -> tuple[str, str]:
    """Digits before and after the decimal mark; a comma that groups no thousands is one."""
    if "." not in number and number.count(",") == 1 and len(number.split(",")[1]) != 3:
        number = number.replace(",", ".")
    whole, _, fraction = number.replace(",", "").partition(".")
    return whole, fraction


def is_one(number: str) -> bool:
    return split_decimal(number) == ("1", "")


def money(number: str, scale: str, one: str, many: str, cent: str, cents: str) -> str:
    """An amount with its currency's names; no `cent` where the currency has none in use."""
    whole, fraction = split_decimal(number)
    if scale:
        return f"{decimal(number)} {scale} {many}"
    if not fraction or not cent or len(fraction) > 2:
        return f"{decimal(number)} {one if is_one(number) else many}"
    small = fraction.ljust(2, "0").lstrip("0")
    parts = []
    if whole.strip("0"):
        parts.append(f"{cardinal(whole)} {one if whole == '1' else many}")
    if small:
        parts.append(f"{cardinal(small)} {cent if small == '1' else cents}")
    return " and ".join(parts) or f"zero {many}"


def fraction(top: str, bottom: str) -> str | None:
    """`3/4` as three quarters; None where it is not read as a fraction."""
    if len(top) > 2 or len(bottom) > 2 or not 0 < int(top) < int(bottom) or not 2 <= int(bottom) <= 20:
        return None
    part = _FRACTIONS.get(int(bottom)) or ordinal(bottom)
    if int(top) == 1:
        return f"one {part}"
    return f"{cardinal(top)} {'halves' if part == 'half' else part + 's'}"


def clock(hour: str, minute: str, second: str | None, half: str) -> str:
    """A time of day; `half` is "", "a m" or "p m"."""
    spoken = [cardinal(str(int(hour)))]
    if minute == "00" and second is None:
        spoken += [] if half or int(hour) == 0 else ["o'clock"]
        if int(hour) == 0:
            spoken = ["midnight"] if not half else spoken
    else:
        spoken.append(cardinal(minute) if minute[0] != "0" else f"oh {DIGITS[int(minute[1])]}")
    if second is not None:
        spoken.append(f"and {cardinal(str(int(second)))} seconds")
    return " ".join([*spoken, half]).strip()


def date(year_digits: str, month: str, day: str) -> str | None:
    if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return None
    spoken_year = year(year_digits) if is_year(year_digits) else cardinal(year_digits)
    return f"{MONTHS[int(month) - 1]} {ordinal(str(int(day)))} {spoken_year}"


def decade(digits: str) -> str | None:
    """`1990` or `90` as nineteen nineties, nineties."""
    spoken = year(digits) if len(digits) == 4 and is_year(digits) else cardinal(digits)
    if digits[-1] != "0":
        return None
    return spoken[:-1] + "ies" if spoken.endswith("y") else spoken + "s"
