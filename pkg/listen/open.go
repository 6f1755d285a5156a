package listen

import "errors"

// OpenAll opens something for each line of a configuration. If any cannot be opened, OpenAll closes the others and
// returns all failures in one error.
func OpenAll[Line, Opened any](lines []Line, open func(Line) (Opened, error), closeOne func(Opened)) ([]Opened, error) {
	var all []Opened
	var errs []error
	for _, l := range lines {
		opened, err := open(l)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		all = append(all, opened)
	}
	if err := errors.Join(errs...); err != nil {
		for _, opened := range all {
			closeOne(opened)
		}
		return nil, err
	}
	return all, nil
}
