#!/bin/sh
# The study of docs/results.md, written to the folder $1 (default runs/study). It can be stopped with Ctrl-C and started
# again at any time: finished jobs are not run again. Three seeds of the main methods come first, for early results.
set -e
OUT=${1:-runs/study}
MARBLE=${MARBLE:-marble}
BATCHES=${BATCHES:-50}
# A crashed job leaves empty cells in its table (exit code 1); the other jobs continue.
holes() { [ $? -eq 1 ]; }
# Six rewards, one of which opposes the others.
conflict() { OMP_NUM_THREADS=1 $MARBLE compare configs/mini-conflict.yaml --out "$OUT/conflict" "$@" || holes; }
# Five times as many images a step.
large() { OMP_NUM_THREADS=1 $MARBLE compare configs/mini-large.yaml --out "$OUT/large" "$@" || holes; }
compare() { OMP_NUM_THREADS=1 $MARBLE compare configs/mini-study.yaml --out "$OUT" "$@" || holes; }

compare --methods base,joint --seeds 0-2
conflict --methods base,weighted_sum,uniform,marble,marble_alpha_over_norm,min_variance --seeds 0-2
large --methods base,weighted_sum,uniform,unit_mean,min_variance,marble_every_step --seeds 0-2
compare --methods variants --seeds 0-2
compare --methods ablations --seeds 0-2
compare --methods base,joint,marble_alpha_over_norm --seeds 3-4
compare --methods specialists --seeds 0-4
# The weighted sum on raw scores, without dividing PickScore by 26.
compare --methods weights:1,1,26,1,1 --seeds 0-2
# The registered plan (docs/results/plan.md): A, specialists in few prompts; B is `fair` above; C, eight rewards.
rare() { OMP_NUM_THREADS=1 $MARBLE compare configs/mini-rare.yaml --out "$OUT/rare" "$@" || holes; }
rare --methods base,specialists,weighted_sum,gdpo,uniform,marble,fair --seeds 0-3
rare --methods base,weighted_sum,gdpo,uniform,marble,fair --seeds 0-7
# E, part A again with more images a prompt and new seeds.
closely() { OMP_NUM_THREADS=1 $MARBLE compare configs/mini-rare.yaml --out "$OUT/closely" --set evaluation.images_per_prompt=8 "$@" || holes; }
closely --methods base,weighted_sum,gdpo,uniform,fair --seeds 8-17
many() { OMP_NUM_THREADS=1 $MARBLE compare configs/mini-many.yaml --out "$OUT/many" "$@" || holes; }
many --methods base,specialists,weighted_sum,gdpo,unit_mean,fair --seeds 0-1
many --methods base,weighted_sum,gdpo,unit_mean,fair --seeds 0-4
# D, the opposing reward as an objective, as a guard at three floors, by weights, and not at all.
guards() { OMP_NUM_THREADS=1 $MARBLE compare configs/mini-conflict.yaml --out "$OUT/guards" "$@" || holes; }
guards --methods base,fair --seeds 0-4
for floor in 1 2 3; do
  guards --methods "guard_0$floor=balance={type: fair},rewards.5.guard={floor: -0.0$floor}" --seeds 0-3
done
guards --methods weights:1,1,1,1,1,0.5,weights:1,1,1,1,1,1,weights:1,1,1,1,1,2,weights:1,1,1,1,1,4 --seeds 0-2
OMP_NUM_THREADS=1 $MARBLE compare configs/mini-conflict.yaml --out "$OUT/unguarded" --methods fair --seeds 0-3 \
  --set rewards.5.held_out=true || holes
${PYTHON:-python} -m tools.study.guards measure "$OUT/guards" "$OUT/unguarded"
# F, noise that the samples of a prompt share.
group() { OMP_NUM_THREADS=1 $MARBLE compare "configs/$1.yaml" --out "$2" --methods 'fair_group=balance={type: fair},loss.noise=group' --seeds 0-4 || holes; }
group mini-rare "$OUT/noise/rare"
group mini-study "$OUT/noise/study"
# H, lazy regularisation off-policy.
LAG='balance={type: fair},rollout.old_policy={flat: 0, uprate: 0.01, uphold: 0.5}'
OMP_NUM_THREADS=1 $MARBLE compare configs/mini-rare.yaml --out "$OUT/lazy" --seeds 0-4 \
  --methods "every=$LAG,loss.regularize_every=1" --methods "lazy=$LAG,loss.regularize_every=4" || holes
# T, time to score: one job at a time, whose CPU time counts.
timed() {
  OMP_NUM_THREADS=1 $MARBLE compare "configs/$1.yaml" --out "$2" --curve 10 --jobs 1 --seeds 0-4 --against plain \
    --methods 'plain=balance={type: weighted_sum},rollout.old_policy=default,loss.timesteps_per_sample=null,loss.regularize_every=1' \
    --methods 'ours=balance={type: fair}' --methods 'twice=balance={type: fair},rollout.epochs=2' || holes
}
timed mini-rare "$OUT/time/rare"
timed mini-study "$OUT/time/study"
# Diagnoses of the gradients: at the beginning and end of training, and with a reward that opposes the others.
diagnose() { [ -e "$1/diagnosis/diagnosis.json" ] || OMP_NUM_THREADS=1 $MARBLE diagnose "$1" --batches "$BATCHES"; }
begin() { OMP_NUM_THREADS=1 $MARBLE train "configs/$1.yaml" --out "$2/diagnoses/beginning" --set trainer.steps=5 --resume-or-start; }
begin mini-study "$OUT"
begin mini-conflict "$OUT/conflict"
for run in jobs/marble-seed0/run jobs/weighted_sum-seed0/run conflict/jobs/marble_alpha_over_norm-seed0/run \
  diagnoses/beginning conflict/diagnoses/beginning; do
  diagnose "$OUT/$run"
done
