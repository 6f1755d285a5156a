package kube

import (
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

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
