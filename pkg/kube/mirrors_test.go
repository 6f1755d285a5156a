package kube

import (
	"strings"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Of a long annotation, Mirrors keeps what is more than a name.
func TestMirrorsAnnotation(t *testing.T) {
	log, _ := testkit.NewLog()
	m := new(Client).Mirrors(MirrorsConfig{Annotation: "a"}, new(tunnel.Counters), log)
	long := aService("shop", "long")
	long.Annotations = map[string]string{"a": strings.Repeat("x", 250<<10)}
	if err := m.services.Replace([]any{long}, "1"); err != nil {
		t.Fatal(err)
	}
	if all := m.View().Services; len(all) != 1 || all[0].Annotation != strings.Repeat("x", maxAnnotation) {
		t.Errorf("%d Services", len(all))
	}
}

// An object that causes a panic is left out. The others count, and the process goes on. Package mirror tests the rest.
func TestMirrorsPanic(t *testing.T) {
	log, text := testkit.NewLog()
	counters := new(tunnel.Counters)
	m := new(Client).Mirrors(MirrorsConfig{Annotation: "a"}, counters, log)
	from := m.services.from
	m.services.from = func(o any) (Service, bool) {
		if o.(*serviceObject).Name == "bad" {
			panic("a fault")
		}
		return from(o)
	}
	good, bad := aService("shop", "good"), aService("shop", "bad")
	good.Annotations = map[string]string{"a": "true"}
	if err := m.services.Replace([]any{bad, good}, "1"); err != nil {
		t.Fatal(err)
	}
	if err := m.services.Update(bad); err != nil {
		t.Fatal(err)
	}
	all := m.View().Services
	if len(all) != 1 || all[0].Key() != "shop/good" || counters.Panics.Load() != 2 || len(text.Lines("shop/bad")) != 2 {
		t.Errorf("%+v, %d panics, log:\n%s", all, counters.Panics.Load(), text)
	}
}
