#!/usr/bin/env bash
# Several GPUs of one host: at world = all of them, then 2.
#   [WORLDS="8 2"] [LIMIT=600] ci/gpu/multi.sh OUT [STEP...]
# Needs SGLang of the pin, FlashInfer and the overlay wheel. Each step has LIMIT seconds and leaves
# its log in OUT. NVLink multicast stays off: PCIe cards have none. Exit 1 when a step failed or
# numbers or tokens were not what they must be. On one GPU: doctor and one-gpu. Elsewhere than at
# 2, 4 and 8 ranks: doctor, collectives and no-p2p.
set -uo pipefail
OUT=$(realpath -m "${1:?where the logs go}")
shift
cd "$(dirname "$0")" || exit 4
mkdir -p "$OUT"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
LIMIT=${LIMIT:-600}
all=$(python3 -c 'import torch; print(torch.cuda.device_count())') || exit 4
failed=0 doctored=

step() { # NAME COMMAND..., which may exit with $accept too: what it printed goes to OUT/NAME.log, its tables and RESULT lines also here
    local name=$1 start=$SECONDS code
    shift
    timeout --kill-after=5 "$LIMIT" "$@" >"$OUT/$name.log" 2>&1
    code=$?
    echo "STEP $name: exit $code after $((SECONDS - start)) s"
    # Python leaves with 1 too where the command itself broke.
    [ $code = 0 ] || { [ $code = "${accept:-0}" ] && ! grep -q '^Traceback' "$OUT/$name.log"; } || failed=1
    case $name in
    doctor | bench-* | breakeven-* | collectives-* | no-p2p-* | choice-* | tp-log-* | tp-env-*) cat "$OUT/$name.log" ;;
    *) grep '^RESULT' "$OUT/$name.log" || tail -n 8 "$OUT/$name.log" ;;
    esac
}

left_out() { # STEP WORLD: why it does not run with so many ranks, if so
    local needs=$2
    case $1 in
    doctor) [ -n "$doctored" ] && echo "it ran" && return ;;
    collectives | no-p2p) ;;
    *) ((8 % $2)) && echo "FlashInfer's kernels are for 2, 4 and 8 ranks" && return ;;
    esac
    case $1 in doctor) needs=0 ;; one-gpu) needs=1 ;; esac
    [ "$needs" -le "$all" ] || echo "GPUs here: $all"
}

run() { # STEP WORLD
    local ranks=(torchrun --nproc-per-node "$2") engines=$OUT/engines-$2
    local engine=(python3 eagle_graphs.py --out "$engines" --tp "$2" --tokens 256 --timeout $((LIMIT - 60)))
    case $1 in
    doctor)
        doctored=1
        accept=1 step doctor sglang-overlay doctor --deep # it found something
        ;;
    numbers) step "numbers-$2" "${ranks[@]}" fused_allreduce.py --check ;;
    speed) step "speed-$2" "${ranks[@]}" fused_allreduce.py --hidden 2048 7168 ;;
    fail)
        for stage in preflight allocator build memory peers create self-test replay; do
            step "fail-$stage-$2" "${ranks[@]}" fused_allreduce.py --fail $stage --dtype bfloat16
        done
        ;;
    collectives) step "collectives-$2" "${ranks[@]}" -m sglang_overlay.measure.collectives ;;
    no-p2p)
        step "no-p2p-$2" env NCCL_P2P_DISABLE=1 \
            "${ranks[@]}" -m sglang_overlay.measure.collectives --rows 1,3,8,16,64
        ;;
    one-gpu) # of the times only the ratio says something
        step "one-gpu-$2" "${ranks[@]}" fused_allreduce.py --one-gpu --hidden 2048 7168
        step "one-gpu-numbers-$2" "${ranks[@]}" fused_allreduce.py --one-gpu --check
        step "one-gpu-fail-$2" "${ranks[@]}" fused_allreduce.py --one-gpu --fail self-test
        step "choice-one-gpu-$2" "${ranks[@]}" measured_choice.py --one-gpu
        ;;
    choice)
        step "choice-$2" "${ranks[@]}" measured_choice.py
        step "choice-hang-$2" "${ranks[@]}" measured_choice.py --hang
        ;;
    engine) # the fused kernel rounds elsewhere: tokens part where two logits are that close
        step "tp-$2" "${engine[@]}" tp
        step "tp-trtllm-$2" "${engine[@]}" tp-trtllm --equal tp tp-trtllm --ties tp tp-trtllm
        step "tp-measured-$2" "${engine[@]}" tp-measured --equal tp tp-measured --ties tp tp-measured
        step "tp-log-$2" grep -h -i 'all-\?reduce' "$engines/tp-measured/log"
        accept=1 step "tp-env-$2" sglang-overlay env --log "$engines/tp/log" # ranks differ, as told
        ;;
    engine-eagle3) # leads that no rounding turns over: tokens and accept lengths are equal
        step "tp-eagle3-$2" "${engine[@]}" tp-eagle3
        step "sure-$2" "${engine[@]}" sure --same sure tp-eagle3 # on one GPU
        step "tp-eagle3-measured-$2" "${engine[@]}" tp-eagle3-measured \
            --same tp-eagle3 tp-eagle3-measured --ties tp-eagle3 tp-eagle3-measured
        step "tp-log-eagle3-$2" grep -h -i 'all-\?reduce' "$engines/tp-eagle3-measured/log"
        ;;
    engine-pcie-ipc) # after engine-eagle3: 1 to 64 rows by PCIe-IPC, which the server makes and checks
        step "table-pcie-ipc-$2" python3 pinned_table.py "$OUT/pcie-ipc-$2.json" --world "$2"
        step "tp-eagle3-pcie-ipc-$2" env SGLANG_ALLREDUCE_TABLE="$OUT/pcie-ipc-$2.json" "${engine[@]}" \
            tp-eagle3-pcie-ipc --same tp-eagle3 tp-eagle3-pcie-ipc
        step "tp-log-pcie-ipc-$2" grep -h -i -E 'all-?reduce|pcie-ipc' "$engines/tp-eagle3-pcie-ipc/log"
        ;;
    engine-fail)
        for stage in self-test build preflight; do
            step "tp-fail-$stage-$2" "${engine[@]}" "tp-fail-$stage" --equal tp "tp-fail-$stage"
        done
        ;;
    bench)
        step "model-$2" python3 model.py mtp /tmp/models/mtp
        LIMIT=$((4 * LIMIT)) step "bench-$2" sglang-overlay sweep tp.toml -D tp="$2" --out "$OUT/sweep-$2"
        for name in "fusion off" fused measured; do
            step "breakeven-${name/ /-}-$2" sglang-overlay breakeven --store "$OUT/sweep-$2/results.sqlite" \
                --bench "tp/$name" --baseline "tp/no speculation, fusion off"
        done
        ;;
    *) echo "$1: no such step" >&2 && exit 2 ;;
    esac
}

[ $# = 0 ] && set -- doctor numbers speed one-gpu fail choice collectives no-p2p bench engine engine-eagle3 engine-pcie-ipc engine-fail
for world in ${WORLDS:-$([ "$all" -gt 2 ] && echo "$all") 2}; do
    for one in "$@"; do
        why=$(left_out "$one" "$world")
        if [ -n "$why" ]; then
            echo "STEP $one-$world: left out, $why"
        else
            run "$one" "$world"
        fi
    done
done
exit $failed
