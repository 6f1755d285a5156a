package tunnel

// Prepared is a change of a running module. All steps that can fail have succeeded, but none has taken
// effect yet. The owner calls either Commit or Abort, once.
type Prepared struct {
	Commit func()
	Abort  func()
}

// PreparedAll joins several changes into one.
type PreparedAll []Prepared

// Commit lets all changes take effect, in their order.
func (all PreparedAll) Commit() {
	for _, p := range all {
		p.Commit()
	}
}

// Abort undoes what the changes have prepared, the last one first.
func (all PreparedAll) Abort() {
	for i := len(all) - 1; i >= 0; i-- {
		all[i].Abort()
	}
}
