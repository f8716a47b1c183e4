# What a fake does at each call, in this order. `here` and `verb` are set by the head of the script, `behave` holds
# lines `<VERB>_<KNOB>='value'`; every call leaves a numbered directory below `calls`.
n=0
# Without a process for each earlier call; who loses the race for a number takes the next.
until [ ! -e "$here/calls/$n" ] && mkdir "$here/calls/$n" 2>/dev/null; do n=$((n + 1)); done
call=$here/calls/$n
[ -t 0 ] || [ "$kind" = runtime ] || cat >"$call/stdin"
env >"$call/env"
printf '%s\n' "$@" >"$call/args"
echo $$ >"$call/pid"
echo "$verb" >"$call/.verb" && mv "$call/.verb" "$call/verb"

. "$here/behave"
knob() { local name=${verb}_$1; printf '%s' "${!name-}"; }
# How many calls of this verb there were before this one.
earlier=$(($(cat "$here"/calls/*/verb 2>/dev/null | grep -cx "$verb" || true) - 1))

if [ -n "$(knob IGNORE_TERM)" ]; then trap '' TERM; fi
if [ -n "$(knob GRANDCHILD)" ]; then sleep "$(knob GRANDCHILD)" & fi
if [ -n "$(knob WAIT_FILE)" ]; then until [ -e "$(knob WAIT_FILE)" ]; do sleep 0.02; done; fi
if [ -n "$(knob SLEEP)" ]; then sleep "$(knob SLEEP)"; fi
first=$(knob FAIL_FIRST)
if [ -z "$first" ] || [ "$earlier" -lt "$first" ]; then
    printf '%s' "$(knob STDERR)" >&2
    if [ -n "$(knob AFTER)" ] && [ -n "$real" ]; then feed "$@" >"$call/stdout" || true; fi
    if [ -n "$(knob SIGNAL)" ]; then echo "$(knob SIGNAL)" >"$call/end"; kill -s "$(knob SIGNAL)" $$; fi
    code=$(knob EXIT)
    if [ -n "$first" ] && [ -z "$code" ]; then code=1; fi
    if [ -n "$code" ]; then printf '%s' "$(knob PRINT)"; echo "$code" >"$call/end"; exit "$code"; fi
fi
if [ -n "$(knob PRINT)" ]; then printf '%s' "$(knob PRINT)"; echo 0 >"$call/end"; exit 0; fi
if [ -n "$real" ]; then
    # A runtime is replaced by the real one, which may keep running; a plugin's end is worth knowing.
    [ "$kind" = plugin ] || exec "$real" "$@"
    code=0
    feed "$@" || code=$?
    echo "$code" >"$call/end"
    exit "$code"
fi
default_answer
echo 0 >"$call/end"
