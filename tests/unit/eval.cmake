foreach(part questions statistics)
  hcache_test(eval_${part}_test unit/eval_${part}_test.cc LIBS hcache_eval)
endforeach()
