foreach(part life arena background drafter prompt_logits restore property threads truncation visit)
  hcache_test(scheduler_${part}_test unit/scheduler_${part}_test.cc LIBS hcache_scheduler)
endforeach()
