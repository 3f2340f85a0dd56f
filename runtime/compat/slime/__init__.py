"""slime's flags: the equivalent of each, the page generated from them, and hints for unknown keys.

Open flags.toml first.
"""

from runtime.compat.slime.hints import flag_hint, grader_hint, own_flag_hint
from runtime.compat.slime.page import from_slime_page
from runtime.settings.reading.hints import Adapter

ADAPTER = Adapter(
    own=own_flag_hint,
    flag=flag_hint,
    grader=grader_hint,
    pages={"from-slime.md": from_slime_page},
)
