#!/bin/sh
# Makes one cluster of the servers in PEERS, and keeps it whole. Run it at one place, beside any of them.
#
# Each EVERY_S seconds it
# 1. makes all servers that answer known to each other: at the first start, and when one came back at another address,
# 2. spreads the slots over all servers, if no server has any yet,
# 3. gives the slots of a master that has been down for GRACE_S to the other masters, without its values: it is a cache,
# 4. moves a share of the slots, with their values, to each master that has none.
# While most servers do not answer, it changes nothing: the fault may be on its own side.
#
# PEERS        host:port of each server, with blanks between them; names are looked up each time
# CLI          valkey-cli or redis-cli; CLI_OPTIONS has its options, such as --tls --cacert FILE --user keeper
# REDISCLI_AUTH  the password
set -u
: "${PEERS:?expected host:port of each server}"
CLI=${CLI:-valkey-cli} CLI_OPTIONS=${CLI_OPTIONS:-} GRACE_S=${GRACE_S:-60} EVERY_S=${EVERY_S:-5}
state=$(mktemp -d)
trap 'rm -rf "$state"; exit 0' INT TERM

say() { echo "$(date -u +%FT%TZ) $*"; }

ask() { # SERVER COMMAND...; nothing if the server does not answer
    server=$1 && shift
    # shellcheck disable=SC2086  # the options are words
    timeout 3 "$CLI" $CLI_OPTIONS -h "${server%:*}" -p "${server##*:}" "$@" 2>/dev/null
}

told() { # SERVER COMMAND...; fails unless the server answers OK
    answer=$(ask "$@")
    [ "$answer" = OK ] || { say "$*: ${answer:-no answer}"; return 1; }
}

address() { getent hosts "${1%:*}" | { read -r ip _ && echo "$ip"; }; }

keep() {
    wanted=0 count=0 living='' first=''
    for peer in $PEERS; do
        wanted=$((wanted + 1))
        id=$(ask "$peer" cluster myid) && [ ${#id} = 40 ] || continue
        count=$((count + 1)) living="$living $peer=$id" first=${first:-$peer}
    done
    if [ $((2 * count)) -le "$wanted" ]; then
        say "$count of $wanted servers answer: nothing is changed"
        return
    fi
    nodes=$(ask "$first" cluster nodes)
    introduce && spread && replace && fill
}

introduce() { # fails if a server was not known yet
    is_known=true
    for each in $living; do
        peer=${each%=*} id=${each##*=}
        [ "$peer" != "$first" ] || continue
        ip=$(address "$peer") || continue
        if ! echo "$nodes" | grep -q "^$id $ip:${peer##*:}@[^ ]* [^ ]*\(master\|slave\) .* connected"; then
            say "introducing $peer"
            told "$first" cluster meet "$ip" "${peer##*:}"
            is_known=false
        fi
    done
    $is_known
}

spread() { # fails if a server is missing at the first start
    ask "$first" cluster info | grep -q '^cluster_slots_assigned:0' || return 0
    if [ "$count" -lt "$wanted" ]; then
        say "$count of $wanted servers answer: waiting to spread the slots"
        return 1
    fi
    say "spreading the slots over $count servers"
    take 0 16383 "$living"
}

take() { # FIRST LAST SERVERS; each of the servers takes an equal part of these slots
    number=0
    # shellcheck disable=SC2086  # the servers are words
    set -- "$1" $(($2 - $1 + 1)) $3
    from=$1 slots=$2 && shift 2
    for each in "$@"; do
        first_slot=$((from + slots * number / $#)) number=$((number + 1))
        last_slot=$((from + slots * number / $# - 1))
        [ "$first_slot" -le "$last_slot" ] || continue
        ask "${each%=*}" cluster delslotsrange "$first_slot" "$last_slot" >/dev/null # else they are busy: the dead one's
        told "${each%=*}" cluster addslotsrange "$first_slot" "$last_slot"
    done
}

replace() {
    masters=''
    for each in $living; do
        echo "$nodes" | grep -q "^${each##*=} .*master" && masters="$masters $each"
    done
    dead=$(echo "$nodes" | awk '$3 ~ /(^|,)fail(,|$)/ && $3 ~ /master/ && NF > 8 {print $1}')
    for file in "$state"/*; do # forget when one failed that is back
        [ -e "$file" ] && case " $dead " in *"${file##*/}"*) ;; *) rm "$file" ;; esac
    done
    for id in $dead; do
        [ -e "$state/$id" ] || date +%s >"$state/$id"
        [ $(($(date +%s) - $(cat "$state/$id"))) -ge "$GRACE_S" ] || continue
        say "giving away the slots of $id, which has been down for $GRACE_S s"
        for range in $(echo "$nodes" | awk -v id="$id" '$1 == id {for (at = 9; at <= NF; at++) print $at}'); do
            take "${range%-*}" "${range#*-}" "$masters"
        done
        for each in $masters; do
            ask "${each%=*}" cluster bumpepoch >/dev/null # their claim is the newer one
        done
        for each in $living; do
            told "${each%=*}" cluster forget "$id"
        done
    done
    [ -z "$dead" ]
}

fill() {
    ask "$first" cluster info | grep -q '^cluster_slots_assigned:16384' || return
    for each in $living; do
        if echo "$nodes" | awk -v id="${each##*=}" '$1 == id && $3 ~ /master/ && NF == 8 {found = 1} END {exit !found}'; then
            say "moving slots to ${each%=*}"
            # shellcheck disable=SC2086  # the options are words
            "$CLI" $CLI_OPTIONS --cluster rebalance "$first" --cluster-use-empty-masters --cluster-yes >/dev/null ||
                yes yes | "$CLI" $CLI_OPTIONS --cluster fix "$first" >/dev/null # one that was interrupted
            return
        fi
    done
}

while true; do
    keep
    sleep "$EVERY_S" &
    wait $! # a signal ends the wait, not the sleep
done
