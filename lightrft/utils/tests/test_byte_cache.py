"""The cache within a number of bytes: which values stay."""
from lightrft.utils.byte_cache import ByteCache


def kept(cache, *keys):
    return [key for key in keys if key in cache]


def test_the_value_not_used_for_the_longest_time_goes_first():
    cache = ByteCache(10, len)
    for key in "abc":
        cache.keep(key, "xxxx" if key == "c" else "xxx")
    assert cache.nbytes == 10 and cache.get("a") == "xxx"
    cache.keep("d", "x")
    assert kept(cache, *"abcd") == ["a", "c", "d"] and cache.nbytes == 8 and cache.get("b") is None


def test_a_value_is_kept_once():
    cache = ByteCache(10, len)
    cache.keep("a", "xxx")
    assert cache.keep("a", "yyyy") == "yyyy" and cache.get("a") == "xxx" and cache.nbytes == 3


def test_a_value_beyond_the_budget_stays_where_one_has_to():
    for least, left in ((0, 0), (1, 1)):
        cache = ByteCache(2, len, least)
        assert cache.keep("a", "xxx") == "xxx" and len(cache) == left and cache.nbytes == 3 * left
