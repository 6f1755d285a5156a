package main

import (
	"context"
	"testing"
)

type quiet struct{}

func (quiet) Name() string              { return "quiet" }
func (quiet) Run(context.Context) error { return nil }

type noting struct{ quiet }

func (noting) Note() string { return "the disk is nearly full" }

type telling struct{ quiet }

func (telling) Status() string { return "lag 3s" }

// TestAddFindsWhatIsSaid: add finds the methods with which a module speaks in /readyz.
func TestAddFindsWhatIsSaid(t *testing.T) {
	var d daemon
	d.add(quiet{}, nil)
	if len(d.checks) != 0 {
		t.Errorf("a module that says nothing is in /readyz: %+v", d.checks)
	}
	d.add(quiet{}, func() error { return nil })
	d.add(noting{}, nil)
	d.add(telling{}, nil)
	if len(d.modules) != 4 || len(d.checks) != 3 {
		t.Fatalf("%d modules and %d checks, want 4 and 3", len(d.modules), len(d.checks))
	}
	if c := d.checks[0]; c.Ready == nil || c.Note != nil || c.Status != nil {
		t.Errorf("%+v has not what it was given", c)
	}
	if c := d.checks[1]; c.Note == nil || c.Note() != "the disk is nearly full" {
		t.Errorf("%+v does not note", c)
	}
	if c := d.checks[2]; c.Status == nil || c.Status() != "lag 3s" {
		t.Errorf("%+v does not tell", c)
	}
}
